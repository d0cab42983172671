#include "kernels/gated_delta_net/gated_delta_net.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/buffer.h"
#include "kernels/device/describe.h"
#include "kernels/gated_delta_net/gated_delta_net_backend.h"

namespace dflash {
namespace {

absl::Status CheckShape(const char* operation, const GatedDeltaNetShape& shape,
                        const GatedDeltaNetState& state) {
  if (shape.key_heads < 1 || shape.value_heads < 1 || shape.value_heads % shape.key_heads != 0 ||
      shape.key_dim < 1 || shape.value_dim < 1 || state.slots < 0 || state.max_rows < 0) {
    return absl::InvalidArgumentError(absl::StrCat(operation, ": ", shape.key_heads, " key heads of ",
                                                   shape.key_dim, ", ", shape.value_heads, " value heads of ",
                                                   shape.value_dim, ", ", state.slots, " slots, records of ",
                                                   state.max_rows, " rows"));
  }
  return absl::OkStatus();
}

absl::Status CheckInput(const char* operation, const GatedDeltaNetShape& shape,
                        const GatedDeltaNetInput& input, SegmentList segments,
                        const GatedDeltaNetState& state, const MatrixView& o) {
  DFLASH_RETURN_IF_ERROR(CheckShape(operation, shape, state));
  const int64_t rows = input.qkv.rows, heads = shape.value_heads;
  const auto matches = [rows](const ConstMatrixView& view, int64_t cols, bool or_f32) {
    return IsWellFormed(view) && view.rows == rows && view.cols == cols &&
           (view.dtype == ActivationDType() || (or_f32 && view.dtype == DType::kF32));
  };
  if (!matches(input.qkv, shape.QkvCols(), false) || !matches(input.beta, heads, true) ||
      !matches(input.decay, heads, true) || !matches(o, heads * shape.value_dim, false) ||
      input.a_log == nullptr || input.dt_bias == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(operation, ": qkv ", Describe(input.qkv), ", beta ", Describe(input.beta), ", decay ",
                     Describe(input.decay), ", o ", Describe(o), ", for ", shape.QkvCols(),
                     " columns of qkv, ", heads, " value heads of ", shape.value_dim));
  }
  return CheckSegmentList(operation, segments);
}

}  // namespace

absl::Status GatedDeltaNetVerify(const GatedDeltaNetShape& shape, const GatedDeltaNetInput& input,
                                 SegmentList segments, const PendingRecords& pending,
                                 const GatedDeltaNetState& state, MatrixView o, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckInput("GatedDeltaNetVerify", shape, input, segments, state, o));
  return backend::GatedDeltaNetVerify(shape, input, segments, pending, state, o, stream);
}

absl::Status GatedDeltaNetMixerVerify(const GatedDeltaNetShape& shape, const GatedDeltaNetInput& input,
                                      const GatedDeltaNetSurroundings& around, SegmentList segments,
                                      const PendingRecords& pending, const GatedDeltaNetState& state,
                                      MatrixView convolved, MatrixView o, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckInput("GatedDeltaNetMixerVerify", shape, input, segments, state, o));
  const int64_t rows = input.qkv.rows, channels = shape.QkvCols();
  const ConvState& conv = around.conv_state;
  const auto is = [&](const ConstMatrixView& view, int64_t view_rows, int64_t cols, bool or_f32) {
    return IsWellFormed(view) && view.rows == view_rows && view.cols == cols &&
           (view.dtype == ActivationDType() ||
            (or_f32 && (view.dtype == DType::kF32 || view.dtype == DType::kBf16)));
  };
  if (conv.taps < 1 || conv.channels != channels || conv.slots < 0 ||
      !is(around.conv_weight, channels, conv.taps, true) ||
      !is(around.norm_weight, 1, shape.value_dim, true) || !is(around.z, rows, o.cols, false) ||
      !is(convolved, rows, channels, false) || !(around.eps > 0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "GatedDeltaNetMixerVerify: convolution ", Describe(around.conv_weight), " over ", conv.channels,
        " channels, norm ", Describe(around.norm_weight), ", eps ", around.eps, ", z ", Describe(around.z),
        ", scratch ", Describe(convolved), ", for ", rows, " rows of ", channels, " columns"));
  }
  return backend::GatedDeltaNetMixerVerify(shape, input, around, segments, pending, state, convolved, o,
                                           stream);
}

absl::Status GatedDeltaNetPrefill(const GatedDeltaNetShape& shape, const GatedDeltaNetInput& input,
                                  SegmentList segments, const GatedDeltaNetState& state, MatrixView o,
                                  const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckInput("GatedDeltaNetPrefill", shape, input, segments, state, o));
  return backend::GatedDeltaNetPrefill(shape, input, segments, state, o, stream);
}

absl::Status GatedDeltaNetFold(const GatedDeltaNetShape& shape, const int32_t* slots, int64_t slot_count,
                               const PendingRecords& pending, const GatedDeltaNetState& state,
                               const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckShape("GatedDeltaNetFold", shape, state));
  if (slot_count < 0 || (slot_count > 0 && slots == nullptr)) {
    return absl::InvalidArgumentError(
        absl::StrCat("GatedDeltaNetFold: no slots behind a count of ", slot_count));
  }
  return backend::GatedDeltaNetFold(shape, slots, slot_count, pending, state, stream);
}

}  // namespace dflash
