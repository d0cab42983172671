// Which instructions the CPU kernels use. Every set computes the same bits (kernels/device/cpu/simd.h); they
// differ in speed only.
#pragma once

#include "absl/status/status.h"

namespace dflash {

enum class InstructionSet {
  kScalar,  // x86-64 baseline; fused multiply-add from the C library
  kAvx2,    // AVX2 and FMA
  kAvx512,  // AVX-512 F, BW, DQ, VL and FMA
};

// "scalar", "avx2" or "avx512".
const char* Name(InstructionSet set);

// Whether processor and operating system can run `set`.
bool IsSupported(InstructionSet set);

// The set in use: the best supported one until SetInstructionSet() chooses another.
InstructionSet CurrentInstructionSet();

// Chooses the set for the whole process. Call it while no operation runs (in main before the first stream, or
// in a test between two operations). InvalidArgument: this machine cannot run the set.
absl::Status SetInstructionSet(InstructionSet set);

// The one of three tables that belongs to the current set.
template <typename Table>
const Table& ForCurrentInstructionSet(const Table& scalar, const Table& avx2, const Table& avx512) {
  switch (CurrentInstructionSet()) {
    case InstructionSet::kScalar:
      return scalar;
    case InstructionSet::kAvx2:
      return avx2;
    case InstructionSet::kAvx512:
      return avx512;
  }
  return scalar;
}

}  // namespace dflash
