// Reference of rope.h: one thread, no tricks. Acc = double is the oracle of the tests. The angle is a float32
// product by contract, so it is one here too.
#pragma once

#include <cmath>
#include <cstdint>

namespace dflash {

// One head at absolute position `position`, in place.
template <typename Acc>
void RopeRef(Acc* x, int64_t rotary_dim, double theta, int64_t position) {
  const int64_t half = rotary_dim / 2;
  for (int64_t j = 0; j < half; ++j) {
    const float frequency =
        static_cast<float>(std::pow(theta, -2.0 * static_cast<double>(j) / static_cast<double>(rotary_dim)));
    const float angle = static_cast<float>(position) * frequency;
    const Acc c = std::cos(static_cast<Acc>(angle)), s = std::sin(static_cast<Acc>(angle));
    const Acc first = x[j], second = x[j + half];
    x[j] = first * c - second * s;
    x[j + half] = second * c + first * s;
  }
}

}  // namespace dflash
