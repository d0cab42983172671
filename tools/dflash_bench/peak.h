// The two things a core can do, with the vectors of each instruction set: read memory, multiply and add.
#pragma once

#include <cstdint>

namespace dflash::bench {

struct PeakKernels {
  // Reads `bytes`, a multiple of 512; returns something that depends on all of them.
  int32_t (*read)(const void* data, int64_t bytes);
  // `steps` x kMultiplyAddsPerStep fused multiply-adds on registers.
  float (*multiply_add)(int64_t steps, float factor);
};
inline constexpr int64_t kMultiplyAddsPerStep = 16 * 12;

extern const PeakKernels kPeakScalar;
extern const PeakKernels kPeakAvx2;
extern const PeakKernels kPeakAvx512;

}  // namespace dflash::bench
