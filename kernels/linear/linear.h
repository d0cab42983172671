// Linear layers y = x Wᵀ.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/matrix_view.h"
#include "base/phase.h"
#include "kernels/device/buffer.h"
#include "kernels/device/stream.h"

namespace dflash {

// What a weight is for. A backend may order its outputs in memory accordingly. What calls compute is the
// same, but not in the same order: the bits of Linear may differ between uses.
enum class LinearUse : uint8_t {
  kAny,
  kGateUp,  // a gate's outputs, then as many of an up projection: LinearSwiGlu (kernels/swiglu) is one kernel
};

// A weight matrix W [N, K] in the backend's own layout (private to linear_*.cc), held once on the device.
class LinearWeight {
 public:
  LinearWeight() = default;
  // Stacks matrices [N_i, K] (host memory, bf16 or f32, all alike) along N and packs them. Projections that
  // read the same input are stacked so that one call serves them all; the order of `parts` is the order of
  // y's columns. Errors: InvalidArgument when parts is empty, a part has no rows or columns, K or dtypes
  // differ, or a gate and an up projection do not make an even number of outputs; ResourceExhausted when the
  // device has no room.
  static absl::StatusOr<LinearWeight> Pack(const std::vector<ConstMatrixView>& parts, const Stream& stream,
                                           LinearUse use = LinearUse::kAny);

  // The same in pieces, for weights that arrive little by little: a weight of zeros, then its outputs
  // [first_output, first_output + rows.rows) from rows [R, K] of its dtype in device memory, each once.
  // PackRows is enqueued on `stream`. Errors: InvalidArgument when sizes or dtypes disagree;
  // ResourceExhausted.
  static absl::StatusOr<LinearWeight> Allocate(int64_t out_features, int64_t in_features, DType dtype,
                                               const Stream& stream, LinearUse use = LinearUse::kAny);
  absl::Status PackRows(ConstMatrixView rows, int64_t first_output, const Stream& stream);

  int64_t out_features() const { return out_features_; }
  int64_t in_features() const { return in_features_; }
  DType dtype() const { return dtype_; }
  LinearUse use() const { return use_; }
  const Buffer& packed() const { return packed_; }

 private:
  int64_t out_features_ = 0;
  int64_t in_features_ = 0;
  DType dtype_ = DType::kBf16;
  LinearUse use_ = LinearUse::kAny;
  Buffer packed_;
};

// y[t, n] = sum_k x[t, k] W[n, k], products and sums in float32.
// x: activation dtype [T, K]; y: activation dtype or f32 [T, N]. T >= 0. No aliasing.
// VERIFY rows: the bits of a row do not depend on T nor on the other rows (every K is reduced in one fixed
// order); PREFILL rows: one fixed algorithm per (N, K). The CPU computes both alike: float32, k ascending,
// one fma a step, threads and vector lanes over outputs. Errors: InvalidArgument when shapes or dtypes
// disagree.
absl::Status Linear(ConstMatrixView x, const LinearWeight& w, Phase phase, MatrixView y,
                    const Stream& stream);

// The phase whose arithmetic takes this backend less time for so many rows. Only for rows whose bits may
// depend on how many rows come with them: those of a draft, since no text depends on a proposal. The CPU,
// which computes both alike, says VERIFY.
Phase FasterLinearPhase(int64_t rows);

}  // namespace dflash
