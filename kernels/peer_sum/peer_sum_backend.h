// What a backend provides behind peer_sum.h; the arguments have been checked.
#pragma once

#include "kernels/peer_sum/peer_sum.h"

namespace dflash::backend {

// The stop word, a uint32, is the first of an area.
int64_t PeerAreaBytes(int size, int64_t max_rows, int64_t cols);
int64_t UsefulPeerSumRows();
absl::Status PreparePeerArea(void* area, int64_t bytes, int size, const Stream& stream);

// With `residual` null the sum goes to y, which may be product.
absl::Status PeerSum(const PeerAreas& areas, ConstMatrixView product, const MatrixView* residual,
                     ConstMatrixView w, NormWeight weight, float eps, MatrixView y,
                     const PeerPatience& patience, const Stream& stream);

// Messages of the root, or of all ranks with root -1: rank r's goes to receive + r * bytes, the root's to
// receive.
absl::Status PeerExchange(const PeerAreas& areas, const void* send, void* receive, int64_t bytes, int root,
                          const PeerPatience& patience, const Stream& stream);

}  // namespace dflash::backend
