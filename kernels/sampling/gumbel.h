// Gumbel noise from one random word, in float32: argmax over v of (log-weight[v] + noise[v]) is an exact draw
// from the softmax of the log-weights. Source: docs/spec/verification.md "Random numbers".
#pragma once

#include <cstdint>

#include "kernels/elementary/elementary.h"

namespace dflash {

// -ln(-log1p(-u)) with u = (x + 1/2) 2^-32, at most 1 - 2^-24. Large noise comes from small u, where float32
// keeps full relative precision; it ranges from -2.8 to 22.9. Over lanes V as in kernels/elementary.
template <typename V>
DFLASH_LANE_INLINE V GumbelNoise(typename V::Int x) {
  const auto low = V::Int::Broadcast(0xffff);
  // float(x), rounded once: the upper product and both halves are exact.
  const V widened = Fma(ToFloat((x >> 16) & low), V::Broadcast(0x1p16f), ToFloat(x & low));
  const V u =
      Min(Fma(widened, V::Broadcast(0x1p-32f), V::Broadcast(0x1p-33f)), V::Broadcast(1.0f - 0x1p-24f));
  const V zero = V::Broadcast(0);
  return zero - Log(zero - Log1p(zero - u));
}

DFLASH_LANE_INLINE float GumbelNoiseF32(uint32_t x) { return GumbelNoise<Lane>(IntLane{x}).v; }

}  // namespace dflash
