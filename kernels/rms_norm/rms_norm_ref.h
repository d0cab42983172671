// Reference of rms_norm.h: one thread, no tricks. Acc = double is the oracle of the tests.
#pragma once

#include <cmath>
#include <cstdint>

namespace dflash {

// One group of D columns; offset = 0 (plain weight) or 1 (1 + w).
template <typename Acc, typename X, typename W, typename Y>
void RmsNormRef(const X* x, const W* w, Acc offset, Acc eps, int64_t D, Y* y) {
  Acc sum = 0;
  for (int64_t d = 0; d < D; ++d) sum += static_cast<Acc>(x[d]) * static_cast<Acc>(x[d]);
  const Acc root = std::sqrt(sum / static_cast<Acc>(D) + eps);
  for (int64_t d = 0; d < D; ++d) {
    y[d] = static_cast<Y>(static_cast<Acc>(x[d]) / root * (offset + static_cast<Acc>(w[d])));
  }
}

// One head: y = w * x / rms(x) * gate(z), gate(z) = sigmoid(z), times z when `silu`.
template <typename Acc, typename X, typename W, typename Y>
void GatedRmsNormRef(const X* x, const W* w, const X* z, bool silu, Acc eps, int64_t D, Y* y) {
  RmsNormRef<Acc>(x, w, Acc(0), eps, D, y);
  for (int64_t d = 0; d < D; ++d) {
    const Acc gate = static_cast<Acc>(z[d]);
    y[d] = static_cast<Y>(static_cast<Acc>(y[d]) * (silu ? gate : Acc(1)) / (Acc(1) + std::exp(-gate)));
  }
}

}  // namespace dflash
