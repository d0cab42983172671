#include "kernels/causal_conv/causal_conv.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/causal_conv/causal_conv_backend.h"
#include "kernels/device/buffer.h"
#include "kernels/device/describe.h"

namespace dflash {
namespace {

absl::Status CheckState(const char* operation, ConstMatrixView x, SegmentList segments,
                        const ConvState& state) {
  if (!IsWellFormed(x) || x.dtype != ActivationDType() || state.slots < 0 || state.taps < 1 ||
      state.channels < 1 || x.cols != state.channels) {
    return absl::InvalidArgumentError(absl::StrCat(operation, ": input ", Describe(x), ", state of ",
                                                   state.slots, " slots x ", state.taps, " taps x ",
                                                   state.channels, " channels"));
  }
  return CheckSegmentList(operation, segments);
}

}  // namespace

int64_t ConvState::Bytes() const { return slots * (taps - 1) * channels * SizeOf(ActivationDType()); }

absl::Status CausalConv(ConstMatrixView x, ConstMatrixView w, SegmentList segments, const ConvState& state,
                        MatrixView y, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckState("CausalConv", x, segments, state));
  if (!IsWellFormed(w) || w.rows != state.channels || w.cols != state.taps || !IsWellFormed(y) ||
      y.dtype != ActivationDType() || y.rows != x.rows || y.cols != x.cols) {
    return absl::InvalidArgumentError(absl::StrCat("CausalConv: input ", Describe(x), ", weight ",
                                                   Describe(w), ", output ", Describe(y), ", ", state.taps,
                                                   " taps"));
  }
  return backend::CausalConv(x, w, segments, state, y, stream);
}

absl::Status AdvanceConvState(ConstMatrixView x, SegmentList segments, const int32_t* row_counts,
                              const ConvState& state, const Stream& stream) {
  return AdvanceConvStates({{x, state}}, segments, row_counts, stream);
}

absl::Status AdvanceConvStates(const std::vector<ConvCommit>& layers, SegmentList segments,
                               const int32_t* row_counts, const Stream& stream) {
  for (const ConvCommit& layer : layers) {
    DFLASH_RETURN_IF_ERROR(CheckState("AdvanceConvState", layer.x, segments, layer.state));
    const ConvCommit& first = layers[0];
    if (layer.x.rows != first.x.rows || layer.state.slots != first.state.slots ||
        layer.state.taps != first.state.taps || layer.state.channels != first.state.channels) {
      return absl::InvalidArgumentError("AdvanceConvStates: layers of different shapes");
    }
  }
  return layers.empty() ? absl::OkStatus() : backend::AdvanceConvStates(layers, segments, row_counts, stream);
}

}  // namespace dflash
