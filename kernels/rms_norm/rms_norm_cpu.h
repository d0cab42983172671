// The CPU kernels of rms_norm.h, one group of columns at a time.
#pragma once

#include <cstdint>

#include "base/matrix_view.h"
#include "kernels/rms_norm/rms_norm.h"

namespace dflash {

struct NormGroup {
  int64_t dim = 0;
  const void* weight = nullptr;  // [dim], bf16 or f32
  bool weight_is_bf16 = false;
  float offset = 0;  // factor = offset + weight
  float eps = 0;
};

enum class NormGate { kNone, kSilu, kSigmoid };

struct RmsNormKernels {
  // y = norm(x) * factor * gate(z). y may be x; z is not read without a gate.
  void (*norm)(const NormGroup& group, const float* x, NormGate gate, const float* z, float* y);
  // residual += delta; y = norm(residual) * factor.
  void (*add_norm)(const NormGroup& group, float* residual, const float* delta, float* y);
};

extern const RmsNormKernels kRmsNormScalar;
extern const RmsNormKernels kRmsNormAvx2;
extern const RmsNormKernels kRmsNormAvx512;

const RmsNormKernels& CurrentRmsNormKernels();

// What is worth a hand-over to another thread: elements of a part. A group waits once for its sum, root and
// quotient, which takes as long as so many elements.
inline constexpr int64_t kNormElementsPerPart = 3072;
inline constexpr int64_t kElementsWorthAGroup = 128;

// The groups that the weight w [1, dim] norms.
NormGroup NormGroupOf(const ConstMatrixView& w, NormWeight weight, float eps);
NormGate NormGateOf(GateActivation gate);

}  // namespace dflash
