// Test support for the CPU backend: the same computation under every instruction set and several thread
// counts must give the same bits.
#pragma once

#include <string>

#include "gtest/gtest.h"
#include "kernels/device/cpu/instruction_set.h"
#include "kernels/device/stream.h"
#include "kernels/testing/compare.h"

namespace dflash {

// Uses `set` until the end of the scope.
class ScopedInstructionSet {
 public:
  explicit ScopedInstructionSet(InstructionSet set) : before_(CurrentInstructionSet()) {
    DFLASH_CHECK(SetInstructionSet(set).ok());
  }
  ~ScopedInstructionSet() { DFLASH_CHECK(SetInstructionSet(before_).ok()); }
  ScopedInstructionSet(const ScopedInstructionSet&) = delete;
  ScopedInstructionSet& operator=(const ScopedInstructionSet&) = delete;

 private:
  InstructionSet before_;
};

// Calls compute(stream) -> HostMatrix<float> with the scalar set on one thread, then with every other
// supported set and 1, 2 and 3 threads, and expects equal bits. Returns the first result.
template <typename Compute>
HostMatrix<float> ExpectEqualOnAllCpuVariants(const Compute& compute) {
  HostMatrix<float> first;
  bool have_first = false;
  for (InstructionSet set : {InstructionSet::kScalar, InstructionSet::kAvx2, InstructionSet::kAvx512}) {
    if (!IsSupported(set)) continue;
    const ScopedInstructionSet scoped(set);
    for (int threads : {1, 2, 3}) {
      SCOPED_TRACE(std::string(Name(set)) + ", threads: " + std::to_string(threads));
      auto stream = Stream::Create({.threads = threads});
      DFLASH_CHECK(stream.ok());
      HostMatrix<float> result = compute(*stream);
      if (!have_first) {
        first = std::move(result);
        have_first = true;
      } else {
        EXPECT_TRUE(BitEqual(result, first));
      }
    }
  }
  return first;
}

}  // namespace dflash
