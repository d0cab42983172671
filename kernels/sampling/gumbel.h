// Gumbel noise from one random word, in float32: argmax over v of (log-weight[v] + noise[v]) is an exact draw
// from the softmax of the log-weights. Source: docs/spec/verification.md "Random numbers".
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/elementary/elementary.h"

namespace dflash {

// -ln(-log1p(-u)) with u = (x + 1/2) 2^-32, at most 1 - 2^-24. Large noise comes from small u, where float32
// keeps full relative precision; it ranges from -2.8 to 22.9.
inline float GumbelNoise(uint32_t x) {
  // float(x), rounded once: the upper product and both halves are exact.
  const float widened = std::fma(static_cast<float>(x >> 16), 0x1p16f, static_cast<float>(x & 0xffffu));
  const float u = std::min(std::fma(widened, 0x1p-32f, 0x1p-33f), 1.0f - 0x1p-24f);
  return -LogF32(-Log1pF32(-u));
}

}  // namespace dflash
