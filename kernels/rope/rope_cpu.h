// The CPU kernel of rope.h.
#pragma once

#include <cstdint>

namespace dflash {

struct RopeKernels {
  // Rotates the pairs (x[j], x[j + half]), j in [0, half), of `heads` heads that lie head_dim apart.
  void (*rotate)(const float* cosines, const float* sines, int64_t half, int64_t heads, int64_t head_dim,
                 float* x);
};

extern const RopeKernels kRopeScalar;
extern const RopeKernels kRopeAvx2;
extern const RopeKernels kRopeAvx512;

}  // namespace dflash
