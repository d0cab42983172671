#include "kernels/rms_norm/rms_norm_cpu.h"

#include <algorithm>

#include "kernels/device/cpu/instruction_set.h"
#include "kernels/device/cpu/thread_pool.h"
#include "kernels/rms_norm/rms_norm_backend.h"

namespace dflash::backend {
namespace {

// What is worth a hand-over to another thread. A group waits once for its sum, root and quotient.
constexpr int64_t kElementsPerPart = 3072;
constexpr int64_t kElementsWorthAGroup = 128;

const RmsNormKernels& Kernels() {
  return ForCurrentInstructionSet(kRmsNormScalar, kRmsNormAvx2, kRmsNormAvx512);
}

NormGroup GroupOf(const ConstMatrixView& w, float offset, float eps) {
  NormGroup group;
  group.dim = w.cols;
  group.weight = w.data;
  group.weight_is_bf16 = w.dtype == DType::kBf16;
  group.offset = offset;
  group.eps = eps;
  return group;
}

float OffsetOf(NormWeight weight) {
  switch (weight) {
    case NormWeight::kPlain:
      return 0;
    case NormWeight::kOnePlus:
      return 1;
  }
  return 0;
}

// Calls fn(row, first column) for every group of `dim` columns.
template <typename Fn>
void ForEachGroup(const Stream& stream, const ConstMatrixView& x, int64_t dim, const Fn& fn) {
  const int64_t groups = x.cols / dim;
  ParallelFor(stream, x.rows * groups, std::max<int64_t>(1, kElementsPerPart / (dim + kElementsWorthAGroup)),
              [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; ++i) fn(i / groups, i % groups * dim);
              });
}

}  // namespace

absl::Status RmsNorm(ConstMatrixView x, ConstMatrixView w, NormWeight weight, float eps, MatrixView y,
                     const Stream& stream) {
  const RmsNormKernels& kernels = Kernels();
  const NormGroup group = GroupOf(w, OffsetOf(weight), eps);
  ForEachGroup(stream, x, w.cols, [&](int64_t row, int64_t col) {
    kernels.norm(group, x.Row<float>(row) + col, NormGate::kNone, nullptr, y.Row<float>(row) + col);
  });
  return absl::OkStatus();
}

absl::Status AddRmsNorm(MatrixView residual, ConstMatrixView delta, ConstMatrixView w, NormWeight weight,
                        float eps, MatrixView y, const Stream& stream) {
  const RmsNormKernels& kernels = Kernels();
  const NormGroup group = GroupOf(w, OffsetOf(weight), eps);
  ForEachGroup(stream, residual, w.cols, [&](int64_t row, int64_t) {
    kernels.add_norm(group, residual.Row<float>(row), delta.Row<float>(row), y.Row<float>(row));
  });
  return absl::OkStatus();
}

absl::Status GatedRmsNorm(ConstMatrixView x, ConstMatrixView w, ConstMatrixView z, GateActivation gate,
                          float eps, MatrixView y, const Stream& stream) {
  const RmsNormKernels& kernels = Kernels();
  const NormGroup group = GroupOf(w, /*offset=*/0, eps);
  const NormGate norm_gate = gate == GateActivation::kSilu ? NormGate::kSilu : NormGate::kSigmoid;
  ForEachGroup(stream, x, w.cols, [&](int64_t row, int64_t col) {
    kernels.norm(group, x.Row<float>(row) + col, norm_gate, z.Row<float>(row) + col, y.Row<float>(row) + col);
  });
  return absl::OkStatus();
}

}  // namespace dflash::backend
