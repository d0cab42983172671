// Reference of swiglu.h: one thread, no tricks. Acc = double is the oracle of the tests.
#pragma once

#include <cmath>
#include <cstdint>

namespace dflash {

// gate_up [T, 2 F], y [T, F], dense.
template <typename Acc, typename X, typename Y>
void SwiGluRef(const X* gate_up, int64_t T, int64_t F, Y* y) {
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t f = 0; f < F; ++f) {
      const Acc gate = static_cast<Acc>(gate_up[t * 2 * F + f]);
      const Acc up = static_cast<Acc>(gate_up[t * 2 * F + F + f]);
      y[t * F + f] = static_cast<Y>(gate / (Acc(1) + std::exp(-gate)) * up);
    }
  }
}

// x, gate, y: `count` elements.
template <typename Acc, typename X, typename Y>
void SigmoidGateRef(const X* x, const X* gate, int64_t count, Y* y) {
  for (int64_t i = 0; i < count; ++i) {
    y[i] = static_cast<Y>(static_cast<Acc>(x[i]) / (Acc(1) + std::exp(-static_cast<Acc>(gate[i]))));
  }
}

}  // namespace dflash
