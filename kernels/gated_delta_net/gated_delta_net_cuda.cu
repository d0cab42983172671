#include "kernels/gated_delta_net/gated_delta_net_cuda.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/device/cuda/vector.cuh"
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

bool IsAligned(const void* data, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0;
}
bool AlignedTo(ConstMatrixView view, int64_t bytes) {
  return IsAligned(view.data, bytes) && view.row_stride * SizeOf(view.dtype) % bytes == 0;
}

// Lays out the workspace of a verification and decides what may be read in pieces.
absl::Status PlanVerify(const char* operation, const GatedDeltaNetShape& shape, ConstMatrixView qkv,
                        ConstMatrixView v, const GatedDeltaNetState& state, const PendingRecords& pending,
                        const CudaContext& context, DeltaTask& task) {
  const int64_t rows = qkv.rows, key_cols = task.KeyCols();
  const int64_t floats = DeltaScratchFloats(rows, key_cols, shape.key_heads, shape.value_heads);
  if (floats * static_cast<int64_t>(sizeof(float)) > kWorkspaceBytes) {
    return absl::UnimplementedError(absl::StrCat(operation, " on CUDA: ", rows, " rows in one call"));
  }
  task.q = static_cast<float*>(context.workspace);
  task.key_query = task.q + rows * key_cols;
  task.gates = task.key_query + rows * shape.key_heads;
  task.v = Bf16RowsOf(v);
  task.is_prepared = true;
  task.pending_buffer = pending.buffer;
  task.pending_count = pending.count;
  task.inputs_vectorized =
      IsVectorized(qkv) && shape.key_dim % kChunk == 0 && AlignedTo(v, 16) && v.cols % kChunk == 0;
  task.floats_aligned = shape.key_dim % 4 == 0 && IsAligned(state.records, 16) &&
                        IsAligned(state.states, 8) && shape.value_dim % kChunk == 0 && AlignedTo(v, 16);
  return absl::OkStatus();
}

}  // namespace

absl::Status GatedDeltaNetVerify(const GatedDeltaNetShape& shape, const GatedDeltaNetInput& input,
                                 SegmentList segments, const PendingRecords& pending,
                                 const GatedDeltaNetState& state, MatrixView o, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckSize("GatedDeltaNetVerify", shape, segments.count));
  if (segments.count == 0 || input.qkv.rows == 0) return absl::OkStatus();
  const CudaContext& context = CudaOf(stream);
  DeltaTask task = TaskOf(shape, input, segments, state, o);
  const ConstMatrixView v = input.qkv.Cols(2 * task.KeyCols(), shape.value_heads * shape.value_dim);
  DFLASH_RETURN_IF_ERROR(
      PlanVerify("GatedDeltaNetVerify", shape, input.qkv, v, state, pending, context, task));
  DFLASH_RETURN_IF_ERROR(
      CudaStatus(LaunchDeltaPrepare(task, input.qkv.rows, context), "GatedDeltaNetVerify"));
  return CudaStatus(LaunchDeltaVerify(task, segments.count, context), "GatedDeltaNetVerify");
}

absl::Status GatedDeltaNetMixerVerify(const GatedDeltaNetShape& shape, const GatedDeltaNetInput& input,
                                      const GatedDeltaNetSurroundings& around, SegmentList segments,
                                      const PendingRecords& pending, const GatedDeltaNetState& state,
                                      MatrixView convolved, MatrixView o, const Stream& stream) {
  const ConvState& conv = around.conv_state;
  if (conv.taps != 4) {
    DFLASH_RETURN_IF_ERROR(CausalConv(input.qkv, around.conv_weight, segments, conv, convolved, stream));
    GatedDeltaNetInput inner = input;
    inner.qkv = convolved;
    DFLASH_RETURN_IF_ERROR(backend::GatedDeltaNetVerify(shape, inner, segments, pending, state, o, stream));
    return GatedRmsNorm(o, around.norm_weight, around.z, around.gate, around.eps, o, stream);
  }
  constexpr const char* kName = "GatedDeltaNetMixerVerify";
  DFLASH_RETURN_IF_ERROR(CheckSize(kName, shape, segments.count));
  if (segments.count == 0 || input.qkv.rows == 0) return absl::OkStatus();
  const CudaContext& context = CudaOf(stream);
  DeltaTask task = TaskOf(shape, input, segments, state, o);
  task.pending_buffer = pending.buffer;
  task.pending_count = pending.count;
  task.conv_taps = static_cast<int32_t>(conv.taps);
  task.conv_weight = ParametersOf(around.conv_weight);
  task.conv_state = {static_cast<__nv_bfloat16*>(conv.data), conv.channels};
  const bool dense = around.conv_weight.dtype == DType::kBf16 && around.conv_weight.row_stride == conv.taps &&
                     IsAligned(around.conv_weight.data, 16);
  if (context.compute_capability == 90 && shape.key_dim == 128 && shape.value_dim == 128 && dense &&
      IsAligned(state.records, 16) && IsAligned(state.states, 16) && AlignedTo(input.qkv, 8) &&
      IsAligned(conv.data, 8) && AlignedTo(around.z, 8) && AlignedTo(o, 8)) {
    task.norm_weight = ParametersOf(around.norm_weight);
    task.z = Bf16RowsOf(around.z);
    task.norm_is_silu = around.gate == GateActivation::kSilu;
    task.norm_eps = around.eps;
    return CudaStatus(LaunchDeltaMixer(task, segments.count, context), kName);
  }
  const ConstMatrixView v = convolved.Cols(2 * task.KeyCols(), shape.value_heads * shape.value_dim);
  DFLASH_RETURN_IF_ERROR(PlanVerify(kName, shape, input.qkv, v, state, pending, context, task));
  task.inputs_vectorized =
      task.inputs_vectorized && dense && conv.channels % kChunk == 0 && IsAligned(conv.data, 16);
  DFLASH_RETURN_IF_ERROR(CudaStatus(LaunchDeltaPrepare(task, input.qkv.rows, context), kName));
  DFLASH_RETURN_IF_ERROR(CudaStatus(LaunchDeltaVerify(task, segments.count, context), kName));
  return GatedRmsNorm(o, around.norm_weight, around.z, around.gate, around.eps, o, stream);
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
