// The sum of a row-parallel product over the ranks of a group, fused with what follows it: one step through
// memory that every rank can read, instead of a collective call and a norm. For few rows, where a call costs
// more than its bytes.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/matrix_view.h"
#include "kernels/device/stream.h"
#include "kernels/rms_norm/rms_norm.h"

namespace dflash {

// The exchange areas of a group as one rank reaches them. A rank writes its own area only. Each is zeroed at
// first and then belongs to this operation: per row a counter, and two places for the row that are used in
// turn, so a rank may write again while the slowest one still reads.
struct PeerAreas {
  static constexpr int kMaxRanks = 8;
  int rank = 0;
  int size = 1;
  void* area[kMaxRanks] = {};  // of every rank, aligned to 256: device memory, the others' mapped here
  int64_t max_rows = 0;
  int64_t cols = 0;

  // Of one area.
  static int64_t Bytes(int64_t max_rows, int64_t cols);
  // The most rows of so many columns for which an area of so many bytes is large enough.
  static int64_t RowsThatFit(int64_t bytes, int64_t cols);
};

// residual += sum over the ranks of product, y = norm(residual) as AddRmsNorm: the same bits as an all-reduce
// of product (in the order of ranks, in float32, rounded once to the activation dtype) and then AddRmsNorm.
// Every rank calls it with the same shapes, at most areas.max_rows rows, one call after the other. product,
// residual, y: activation dtype [T, cols], unchanged product; w: bf16 or f32 [1, cols]. May be captured.
// Waits on the device for the other ranks' rows; when one does not come within `timeout`, *late (int32,
// device memory or pinned, 0 before) becomes 1 + its rank and the results mean nothing. Where ranks share a
// device, blocks of all rows of all ranks must fit on it, and no rank may allocate, free or load a kernel on
// it meanwhile. Errors: InvalidArgument when shapes disagree.
absl::Status PeerSumAddRmsNorm(const PeerAreas& areas, ConstMatrixView product, MatrixView residual,
                               ConstMatrixView w, NormWeight weight, float eps, MatrixView y,
                               absl::Duration timeout, int32_t* late, const Stream& stream);

// What *late becomes when a call ended because the group was stopped.
inline constexpr int32_t kPeerSumStopped = -1;

// Makes the calls under way on all ranks end and later ones return at once. Does not wait for them; `stream`
// must not be one that such a call runs on. For a group that is given up: its areas are of no use afterwards.
absl::Status StopPeerSums(const PeerAreas& areas, const Stream& stream);

}  // namespace dflash
