// A warp per sequence: these kernels move a few hundred bytes, and what they cost is their launch.
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/round/round_backend.h"

namespace dflash::backend {
namespace {

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

__global__ void DraftBlocksKernel(const DecodeState* states, const int32_t* slots, int32_t block_rows,
                                  int32_t mask_token, int32_t* tokens, Segment* segments) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  const auto i = static_cast<int32_t>(blockIdx.x), lane = static_cast<int32_t>(threadIdx.x);
  const int32_t slot = slots[i];
  const DecodeState& state = states[slot];
  const bool runs = state.room > 0;
  for (int32_t row = lane; row < block_rows; row += kLanes) {
    tokens[i * block_rows + row] = runs && row == 0 ? state.anchor : mask_token;
  }
  if (lane == 0) segments[i] = {slot, i * block_rows, runs ? block_rows : 0, state.position};
}

__global__ void VerifyRowsKernel(const DecodeState* states, const RoundEntry* entries,
                                 const int32_t* proposals, int64_t proposal_cols, int64_t vocabulary,
                                 VerifyArrays rows) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  const auto lane = static_cast<int32_t>(threadIdx.x);
  const RoundEntry entry = entries[blockIdx.x];
  const DecodeState& state = states[entry.slot];
  const int32_t* drafts = entry.proposal < 0 ? nullptr : proposals + entry.proposal * proposal_cols;
  int32_t used = 0;
  if (state.room > 0) {
    int32_t most = min(entry.max_drafts, state.room - 1);
    most = drafts == nullptr ? 0 : static_cast<int32_t>(min(int64_t{most}, proposal_cols));
    for (bool ended = false; !ended && used < most;) {  // `used` is the same in all lanes
      const int32_t row = used + lane;
      const bool ends = row >= most || drafts[row] < 0 || drafts[row] >= vocabulary;
      const unsigned ending = __ballot_sync(kAllLanes, ends);
      ended = ending != 0;
      used += ended ? __ffs(static_cast<int>(ending)) - 1 : kLanes;
    }
    ++used;  // the anchor
  }
  for (int32_t row = lane; row < entry.row_capacity; row += kLanes) {
    const int64_t at = entry.first_row + row;
    const bool feeds = row < used;
    rows.tokens[at] = !feeds ? 0 : row == 0 ? state.anchor : drafts[row - 1];
    rows.positions[at] = feeds ? int64_t{state.position} + row + 1 : 0;
    rows.sampling[at] = feeds ? state.sampling : SamplingParams{};
  }
  if (lane == 0) rows.segments[blockIdx.x] = {entry.slot, entry.first_row, used, state.position};
}

__global__ void AcceptRowsKernel(const RoundEntry* entries, VerifyArrays rows, const int32_t* sampled,
                                 DecodeState* states, int32_t* row_counts, RoundResult* results) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  const auto lane = static_cast<int32_t>(threadIdx.x);
  DecodeState& state = states[entries[blockIdx.x].slot];
  const Segment segment = rows.segments[blockIdx.x];
  const int32_t* emits = sampled + segment.first_row;
  const int32_t* feeds = rows.tokens + segment.first_row;
  const int32_t room = state.room, position = state.position, stop_count = state.stop_count;
  RoundResult result = {segment.row_count, 0, 0, position};
  int32_t anchor = state.anchor;
  bool stopped = false;
  for (int32_t base = 0; base < segment.row_count; base += kLanes) {
    const int32_t row = base + lane;
    const int32_t token = row < segment.row_count ? emits[row] : -1;
    const bool accepted = row + 1 < segment.row_count && feeds[row + 1] == token;
    bool stops = token < 0;
    for (int32_t i = 0; i < stop_count; ++i) stops = stops || state.stop_tokens[i] == token;
    const unsigned ending = __ballot_sync(kAllLanes, !accepted || stops || row + 1 == room);
    if (ending == 0) continue;
    const int last = __ffs(static_cast<int>(ending)) - 1;  // the lane whose row emits the last token
    result.emitted = base + last + 1;
    result.accepted = base + last + __shfl_sync(kAllLanes, accepted ? 1 : 0, last);
    anchor = __shfl_sync(kAllLanes, token, last);
    stopped = __shfl_sync(kAllLanes, stops ? 1 : 0, last) != 0;
    break;
  }
  if (lane != 0) return;
  result.position = position + result.emitted;
  row_counts[blockIdx.x] = result.emitted;
  results[blockIdx.x] = result;
  state.anchor = anchor;
  state.position = result.position;
  state.room = stopped ? 0 : room - result.emitted;
}

__global__ void AdvanceTargetKernel(SegmentList segments, const int32_t* row_counts, SlotLengths lengths) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= segments.count) return;
  const int32_t slot = segments.data[i].slot;
  const int32_t rows = row_counts[i];
  lengths.target_kv[slot] += rows;
  lengths.gdn_folded[slot] += lengths.gdn_pending[slot];
  lengths.gdn_pending[slot] = rows;
  lengths.pending_buffer[slot] ^= 1;
}

__global__ void AdvanceDraftKernel(SegmentList segments, const int32_t* row_counts, int32_t* ends) {
  LetNextKernelStart();
  WaitForPreviousKernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= segments.count) return;
  ends[segments.data[i].slot] += row_counts[i];
}

LaunchShape WarpEach(int64_t count) { return {.grid = Grid(count), .block = dim3(kLanes)}; }
LaunchShape ThreadEach(int64_t count) {
  return {.grid = Grid(CeilDiv(count, kLanes)), .block = dim3(kLanes)};
}

}  // namespace

absl::Status MakeDraftBlocks(DecodeStates states, const int32_t* slots, int64_t count, int64_t block_rows,
                             int32_t mask_token, int32_t* tokens, Segment* segments, const Stream& stream) {
  return CudaStatus(Launch(CudaOf(stream), WarpEach(count), DraftBlocksKernel, states.data, slots, block_rows,
                           mask_token, tokens, segments),
                    "MakeDraftBlocks");
}

absl::Status MakeVerifyRows(DecodeStates states, RoundEntries entries, const int32_t* proposals,
                            int64_t proposal_cols, int64_t vocabulary, const VerifyArrays& rows,
                            const Stream& stream) {
  return CudaStatus(Launch(CudaOf(stream), WarpEach(entries.count), VerifyRowsKernel, states.data,
                           entries.data, proposals, proposal_cols, vocabulary, rows),
                    "MakeVerifyRows");
}

absl::Status AcceptRows(RoundEntries entries, const VerifyArrays& rows, const int32_t* sampled,
                        DecodeStates states, int32_t* row_counts, RoundResult* results,
                        const Stream& stream) {
  return CudaStatus(Launch(CudaOf(stream), WarpEach(entries.count), AcceptRowsKernel, entries.data, rows,
                           sampled, states.data, row_counts, results),
                    "AcceptRows");
}

absl::Status AdvanceTargetLengths(SegmentList segments, const int32_t* row_counts, const SlotLengths& lengths,
                                  const Stream& stream) {
  return CudaStatus(
      Launch(CudaOf(stream), ThreadEach(segments.count), AdvanceTargetKernel, segments, row_counts, lengths),
      "AdvanceTargetLengths");
}

absl::Status AdvanceDraftLengths(SegmentList segments, const int32_t* row_counts, const SlotLengths& lengths,
                                 const Stream& stream) {
  return CudaStatus(Launch(CudaOf(stream), ThreadEach(segments.count), AdvanceDraftKernel, segments,
                           row_counts, lengths.draft_context_end),
                    "AdvanceDraftLengths");
}

}  // namespace dflash::backend
