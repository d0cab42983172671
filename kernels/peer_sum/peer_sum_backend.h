// What a backend provides behind peer_sum.h; the arguments have been checked.
#pragma once

#include "kernels/peer_sum/peer_sum.h"

namespace dflash::backend {

absl::Status PeerSumAddRmsNorm(const PeerAreas& areas, ConstMatrixView product, MatrixView residual,
                               ConstMatrixView w, NormWeight weight, float eps, MatrixView y,
                               absl::Duration timeout, int32_t* late, const Stream& stream);

}  // namespace dflash::backend
