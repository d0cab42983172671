#include "kernels/gated_delta_net/gated_delta_net_cuda.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/gated_delta_net/gated_delta_net_backend.h"

namespace dflash::backend {
namespace {

absl::Status CheckSize(const char* operation, const GatedDeltaNetShape& shape, int64_t count) {
  if (shape.key_dim <= kMaxKeyDim && shape.value_heads <= 65535 && count <= 65535) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat(operation, " on CUDA: key_dim ", shape.key_dim, ", ", shape.value_heads, " value heads, ",
                   count, " sequences; at most ", kMaxKeyDim, ", 65535 and 65535 are there"));
}

DeltaTask TaskOf(const GatedDeltaNetShape& shape, const GatedDeltaNetState& state) {
  DeltaTask task = {};
  task.key_heads = static_cast<int32_t>(shape.key_heads);
  task.value_heads = static_cast<int32_t>(shape.value_heads);
  task.key_dim = static_cast<int32_t>(shape.key_dim);
  task.value_dim = static_cast<int32_t>(shape.value_dim);
  task.query_scale = 1.0f / std::sqrt(static_cast<float>(shape.key_dim));
  task.states = state.states;
  task.records = state.records;
  task.max_rows = static_cast<int32_t>(state.max_rows);
  task.record_floats = shape.RecordFloats();
  return task;
}

DeltaTask TaskOf(const GatedDeltaNetShape& shape, const GatedDeltaNetInput& input, SegmentList segments,
                 const GatedDeltaNetState& state, const MatrixView& o) {
  DeltaTask task = TaskOf(shape, state);
  task.qkv = Bf16RowsOf(input.qkv);
  task.o = Bf16RowsOf(o);
  task.beta = ParametersOf(input.beta);
  task.decay = ParametersOf(input.decay);
  task.a_log = input.a_log;
  task.dt_bias = input.dt_bias;
  task.segments = segments.data;
  task.segment_count = static_cast<int32_t>(segments.count);
  return task;
}

}  // namespace

absl::Status GatedDeltaNetVerify(const GatedDeltaNetShape& shape, const GatedDeltaNetInput& input,
                                 SegmentList segments, const PendingRecords& pending,
                                 const GatedDeltaNetState& state, MatrixView o, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckSize("GatedDeltaNetVerify", shape, segments.count));
  DeltaTask task = TaskOf(shape, input, segments, state, o);
  task.pending_buffer = pending.buffer;
  task.pending_count = pending.count;
  return CudaStatus(LaunchDeltaVerify(task, segments.count, CudaOf(stream)), "GatedDeltaNetVerify");
}

absl::Status GatedDeltaNetPrefill(const GatedDeltaNetShape& shape, const GatedDeltaNetInput& input,
                                  SegmentList segments, const GatedDeltaNetState& state, MatrixView o,
                                  const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckSize("GatedDeltaNetPrefill", shape, segments.count));
  return CudaStatus(
      LaunchDeltaPrefill(TaskOf(shape, input, segments, state, o), input.qkv.rows, CudaOf(stream)),
      "GatedDeltaNetPrefill");
}

absl::Status GatedDeltaNetFold(const GatedDeltaNetShape& shape, const int32_t* slots, int64_t slot_count,
                               const PendingRecords& pending, const GatedDeltaNetState& state,
                               const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckSize("GatedDeltaNetFold", shape, slot_count));
  DeltaTask task = TaskOf(shape, state);
  task.fold_slots = slots;
  task.pending_buffer = pending.buffer;
  task.pending_count = pending.count;
  return CudaStatus(LaunchDeltaVerify(task, slot_count, CudaOf(stream)), "GatedDeltaNetFold");
}

}  // namespace dflash::backend
