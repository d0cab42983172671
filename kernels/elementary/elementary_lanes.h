// For the test: the elementary functions over the vector lanes of each instruction set.
#pragma once

#include <cstdint>

namespace dflash {

struct ElementaryLanes {
  // y[i] = f(x[i]), i < count, a multiple of 16.
  using Function = void (*)(const float* x, float* y, int64_t count);
  Function exp, log, log1p, sigmoid, silu, softplus;
};

extern const ElementaryLanes kElementaryLanesScalar;
extern const ElementaryLanes kElementaryLanesAvx2;
extern const ElementaryLanes kElementaryLanesAvx512;

}  // namespace dflash
