#include "kernels/rms_norm/rms_norm_cpu.h"

#include <algorithm>

#include "kernels/device/cpu/instruction_set.h"
#include "kernels/device/cpu/thread_pool.h"
#include "kernels/rms_norm/rms_norm_backend.h"

namespace dflash {

const RmsNormKernels& CurrentRmsNormKernels() {
  return ForCurrentInstructionSet(kRmsNormScalar, kRmsNormAvx2, kRmsNormAvx512);
}

NormGroup NormGroupOf(const ConstMatrixView& w, NormWeight weight, float eps) {
  NormGroup group;
  group.dim = w.cols;
  group.weight = w.data;
  group.weight_is_bf16 = w.dtype == DType::kBf16;
  switch (weight) {
    case NormWeight::kPlain:
      group.offset = 0;
      break;
    case NormWeight::kOnePlus:
      group.offset = 1;
      break;
  }
  group.eps = eps;
  return group;
}

NormGate NormGateOf(GateActivation gate) {
  return gate == GateActivation::kSilu ? NormGate::kSilu : NormGate::kSigmoid;
}

namespace backend {
namespace {

// Calls fn(row, first column) for every group of `dim` columns.
template <typename Fn>
void ForEachGroup(const Stream& stream, const ConstMatrixView& x, int64_t dim, const Fn& fn) {
  const int64_t groups = x.cols / dim;
  ParallelFor(stream, x.rows * groups,
              std::max<int64_t>(1, kNormElementsPerPart / (dim + kElementsWorthAGroup)),
              [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; ++i) fn(i / groups, i % groups * dim);
              });
}

}  // namespace

absl::Status RmsNorm(ConstMatrixView x, ConstMatrixView w, NormWeight weight, float eps, MatrixView y,
                     const Stream& stream) {
  const RmsNormKernels& kernels = CurrentRmsNormKernels();
  const NormGroup group = NormGroupOf(w, weight, eps);
  ForEachGroup(stream, x, w.cols, [&](int64_t row, int64_t col) {
    kernels.norm(group, x.Row<float>(row) + col, NormGate::kNone, nullptr, y.Row<float>(row) + col);
  });
  return absl::OkStatus();
}

absl::Status AddRmsNorm(MatrixView residual, ConstMatrixView delta, ConstMatrixView w, NormWeight weight,
                        float eps, MatrixView y, const Stream& stream) {
  const RmsNormKernels& kernels = CurrentRmsNormKernels();
  const NormGroup group = NormGroupOf(w, weight, eps);
  ForEachGroup(stream, residual, w.cols, [&](int64_t row, int64_t) {
    kernels.add_norm(group, residual.Row<float>(row), delta.Row<float>(row), y.Row<float>(row));
  });
  return absl::OkStatus();
}

absl::Status GatedRmsNorm(ConstMatrixView x, ConstMatrixView w, ConstMatrixView z, GateActivation gate,
                          float eps, MatrixView y, const Stream& stream) {
  const RmsNormKernels& kernels = CurrentRmsNormKernels();
  const NormGroup group = NormGroupOf(w, NormWeight::kPlain, eps);
  const NormGate norm_gate = NormGateOf(gate);
  ForEachGroup(stream, x, w.cols, [&](int64_t row, int64_t col) {
    kernels.norm(group, x.Row<float>(row) + col, norm_gate, z.Row<float>(row) + col, y.Row<float>(row) + col);
  });
  return absl::OkStatus();
}

}  // namespace backend
}  // namespace dflash
