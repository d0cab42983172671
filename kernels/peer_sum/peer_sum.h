// What the ranks of a group exchange in every layer and every round, in one step through memory that they
// reach of each other, instead of a collective call: sums of row-parallel products, fused with what follows
// them, and small messages. For few rows and bytes, where a call costs more than what it carries.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/matrix_view.h"
#include "kernels/device/stream.h"
#include "kernels/rms_norm/rms_norm.h"

namespace dflash {

// The exchange areas of a group as one rank reaches them: zeroed memory of every rank, made ready by
// PreparePeerArea, which then belongs to these operations. What lies where is the backend's.
struct PeerAreas {
  static constexpr int kMaxRanks = 8;
  static constexpr int64_t kMaxRows = 2048;
  static constexpr int64_t kMaxMessageBytes = int64_t{512} << 10;
  int rank = 0;
  int size = 1;
  void* area[kMaxRanks] = {};  // of every rank, aligned to 256: device memory, the others' mapped here
  int64_t max_rows = 0;        // <= kMaxRows
  int64_t cols = 0;
  // Another rank's kernels run on this device: then blocks of all rows of all ranks must fit on it at a time
  // (kRowsOnSharedDevice of all together do), and no rank may allocate, free or load a kernel on it while
  // another waits.
  bool shares_device = false;
  static constexpr int64_t kRowsOnSharedDevice = 128;

  // Of one area.
  static int64_t Bytes(int size, int64_t max_rows, int64_t cols);
  // The most rows of so many columns for which an area of so many bytes is large enough.
  static int64_t RowsThatFit(int size, int64_t bytes, int64_t cols);
};

// How long an operation waits on the device for the other ranks, and where it says that one did not come:
// then *late (int32, device memory or pinned, 0 before) becomes 1 + that rank, or kPeerSumStopped when the
// group was stopped, and the results mean nothing; later calls of this rank do not wait any more.
struct PeerPatience {
  absl::Duration timeout;
  int32_t* late = nullptr;
};
inline constexpr int32_t kPeerSumStopped = -1;

// Makes the rank's own area of `bytes` bytes ready, before any rank uses it.
absl::Status PreparePeerArea(void* area, int64_t bytes, int size, const Stream& stream);

// Sums of more rows are better left to a collective call (docs/performance.md, "Two H200s").
int64_t UsefulPeerSumRows();

// In all of these every rank makes the same calls with the same shapes in the same order. They may be
// captured. Errors: InvalidArgument when shapes disagree.

// residual += sum over the ranks of product, y = norm(residual) as AddRmsNorm: the same bits as an all-reduce
// of product (in the order of ranks, in float32, rounded once to the activation dtype) and then AddRmsNorm.
// At most areas.max_rows rows. product, residual, y: activation dtype [T, cols], unchanged product; w: bf16
// or f32 [1, cols].
absl::Status PeerSumAddRmsNorm(const PeerAreas& areas, ConstMatrixView product, MatrixView residual,
                               ConstMatrixView w, NormWeight weight, float eps, MatrixView y,
                               const PeerPatience& patience, const Stream& stream);

// rows = that sum alone, in place; activation dtype [T, cols].
absl::Status PeerSum(const PeerAreas& areas, MatrixView rows, const PeerPatience& patience,
                     const Stream& stream);

// receive[r * bytes, (r + 1) * bytes) = rank r's send[0, bytes). send may be receive + rank * bytes. bytes:
// at most kMaxMessageBytes, it and both pointers multiples of 4.
absl::Status PeerGather(const PeerAreas& areas, const void* send, void* receive, int64_t bytes,
                        const PeerPatience& patience, const Stream& stream);

// data[0, bytes) = rank root's data[0, bytes). As PeerGather.
absl::Status PeerBroadcast(const PeerAreas& areas, void* data, int64_t bytes, int root,
                           const PeerPatience& patience, const Stream& stream);

// Makes the calls under way on all ranks end and later ones return at once. Does not wait for them; `stream`
// must not be one that such a call runs on. For a group that is given up: its areas are of no use afterwards.
absl::Status StopPeerSums(const PeerAreas& areas, const Stream& stream);

}  // namespace dflash
