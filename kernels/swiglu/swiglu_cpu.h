// The CPU kernels of swiglu.h, over `count` consecutive elements.
#pragma once

#include <cstdint>

namespace dflash {

struct SwiGluKernels {
  void (*silu_product)(const float* gate, const float* up, int64_t count, float* y);  // y = silu(gate) up
  void (*sigmoid_gate)(const float* gate, int64_t count, float* x);                   // x *= sigmoid(gate)
};

extern const SwiGluKernels kSwiGluScalar;
extern const SwiGluKernels kSwiGluAvx2;
extern const SwiGluKernels kSwiGluAvx512;

}  // namespace dflash
