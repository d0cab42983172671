// Reference of linear.h: one thread, no tricks. Acc = double is the oracle of the tests.
#pragma once

#include <cstdint>

namespace dflash {

// x [T, K], w [N, K], y [T, N], all dense.
template <typename Acc, typename X, typename W, typename Y>
void LinearRef(const X* x, const W* w, int64_t T, int64_t N, int64_t K, Y* y) {
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t n = 0; n < N; ++n) {
      Acc sum = 0;
      for (int64_t k = 0; k < K; ++k) sum += static_cast<Acc>(x[t * K + k]) * static_cast<Acc>(w[n * K + k]);
      y[t * N + n] = static_cast<Y>(sum);
    }
  }
}

}  // namespace dflash
