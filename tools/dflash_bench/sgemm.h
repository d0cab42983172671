// The float32 matrix product of a public library, to compare with. Optional: the benchmark alone uses it.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/device/cpu/instruction_set.h"

namespace dflash::bench {

// Name, version and kernel of the library; empty when this build has none.
std::string SgemmLibrary();

// OpenBLAS looks at the processor's model number when the program is loaded, and takes its oldest kernels for
// one that it does not know. Names the kernels for an instruction set in the environment, and how long idle
// threads spin, and starts this program again, once; returns when that is not needed (or not possible).
void ConfigureSgemm(InstructionSet set, char** argv);

void SetSgemmThreads(int threads);

// y[t, n] = sum_k x[t, k] w[n, k], all dense. Only with a library.
void Sgemm(const float* x, const float* w, int64_t rows, int64_t out_features, int64_t in_features, float* y);

// Waits until the library's idle threads no longer spin: they would slow down whatever is timed next.
void SettleSgemm();

}  // namespace dflash::bench
