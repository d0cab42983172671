// A build without OpenBLAS.
#include "base/check.h"
#include "tools/dflash_bench/sgemm.h"

namespace dflash::bench {

std::string SgemmLibrary() { return ""; }
void ConfigureSgemm(InstructionSet, char**) {}
void SettleSgemm() {}
void SetSgemmThreads(int) {}
void Sgemm(const float*, const float*, int64_t, int64_t, int64_t, float*) {
  DFLASH_CHECK(false, "no library to compare with");
}

}  // namespace dflash::bench
