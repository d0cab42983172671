// Root-mean-square norms. Sources: docs/spec/qwen3_5.md "Elementary operations", docs/spec/dflash.md "Forward
// pass".
#pragma once

#include "absl/status/status.h"
#include "base/matrix_view.h"
#include "kernels/device/stream.h"

namespace dflash {

// How a stored norm weight is applied. The target stores weights around 0 (factor 1 + w), its Gated DeltaNet
// output norm and every drafter norm store the factor itself.
enum class NormWeight { kPlain, kOnePlus };

// Normalizes each group of D = w.cols consecutive columns of x (one group for a hidden state, one per head
// for q and k):
//   y[t, h D + d] = x[t, h D + d] / sqrt(mean_d(x[t, h D + d]^2) + eps) * f(w[d]),  f = w or 1 + w
// All in float32, one rounding at the end.
// x, y: activation dtype [T, H D], any row stride; w: bf16 or f32 [1, D]. y may be x.
// Errors: InvalidArgument when shapes disagree, x.cols is no multiple of D, or eps <= 0.
absl::Status RmsNorm(ConstMatrixView x, ConstMatrixView w, NormWeight weight, float eps, MatrixView y,
                     const Stream& stream);

// residual += delta, then y = RmsNorm(residual). Leaves in `residual` the residual stream after the added
// block. residual, delta, y: activation dtype [T, D]; y must alias neither.
absl::Status AddRmsNorm(MatrixView residual, ConstMatrixView delta, ConstMatrixView w, NormWeight weight,
                        float eps, MatrixView y, const Stream& stream);

// Output norm of Gated DeltaNet, per value head of D = w.cols columns: norm first, then gate.
//   y = w[d] * x / sqrt(mean(x^2) + eps) * gate(z),  gate = silu or sigmoid
// x, z, y: activation dtype [T, H D]; w: bf16 or f32 [1, D], plain. y may be x.
enum class GateActivation { kSilu, kSigmoid };
absl::Status GatedRmsNorm(ConstMatrixView x, ConstMatrixView w, ConstMatrixView z, GateActivation gate,
                          float eps, MatrixView y, const Stream& stream);

}  // namespace dflash
