#include "kernels/device/cpu/instruction_set.h"

#include <atomic>

#include "absl/strings/str_cat.h"

namespace dflash {
namespace {

InstructionSet Best() {
  if (IsSupported(InstructionSet::kAvx512)) return InstructionSet::kAvx512;
  if (IsSupported(InstructionSet::kAvx2)) return InstructionSet::kAvx2;
  return InstructionSet::kScalar;
}

std::atomic<InstructionSet>& Current() {
  static std::atomic<InstructionSet> current{Best()};
  return current;
}

}  // namespace

const char* Name(InstructionSet set) {
  switch (set) {
    case InstructionSet::kScalar:
      return "scalar";
    case InstructionSet::kAvx2:
      return "avx2";
    case InstructionSet::kAvx512:
      return "avx512";
  }
  return "?";
}

// __builtin_cpu_supports also asks XGETBV whether the operating system saves the registers.
bool IsSupported(InstructionSet set) {
  switch (set) {
    case InstructionSet::kScalar:
      return true;
    case InstructionSet::kAvx2:
      return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
    case InstructionSet::kAvx512:
      return IsSupported(InstructionSet::kAvx2) && __builtin_cpu_supports("avx512f") != 0 &&
             __builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
             __builtin_cpu_supports("avx512vl") != 0;
  }
  return false;
}

InstructionSet CurrentInstructionSet() { return Current().load(std::memory_order_relaxed); }

absl::Status SetInstructionSet(InstructionSet set) {
  if (!IsSupported(set)) {
    return absl::InvalidArgumentError(absl::StrCat("this machine has no ", Name(set)));
  }
  Current().store(set, std::memory_order_relaxed);
  return absl::OkStatus();
}

}  // namespace dflash
