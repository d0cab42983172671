#include <cblas.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "absl/strings/str_cat.h"
#include "tools/dflash_bench/sgemm.h"

namespace dflash::bench {

std::string SgemmLibrary() {
  return absl::StrCat(openblas_get_config(), " (running kernel: ", openblas_get_corename(), ")");
}

void ConfigureSgemm(InstructionSet set, char** argv) {
  const char* kernel = set == InstructionSet::kAvx512 ? "SkylakeX"
                       : set == InstructionSet::kAvx2 ? "Haswell"
                                                      : "Prescott";
  if (setenv("OPENBLAS_CORETYPE", kernel, /*overwrite=*/0) != 0) return;
  // 2^20 ticks of the time stamp counter, about half a millisecond: longer than any gap inside a pass.
  if (setenv("OPENBLAS_THREAD_TIMEOUT", "20", /*overwrite=*/0) != 0) return;
  if (std::getenv("DFLASH_BENCH_AGAIN") != nullptr || setenv("DFLASH_BENCH_AGAIN", "1", 1) != 0) return;
  execv("/proc/self/exe", argv);
}

void SettleSgemm() { std::this_thread::sleep_for(std::chrono::milliseconds(2)); }

void SetSgemmThreads(int threads) { openblas_set_num_threads(threads); }

void Sgemm(const float* x, const float* w, int64_t rows, int64_t out_features, int64_t in_features,
           float* y) {
  const auto t = static_cast<blasint>(rows), n = static_cast<blasint>(out_features),
             k = static_cast<blasint>(in_features);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, t, n, k, 1, x, k, w, k, 0, y, n);
}

}  // namespace dflash::bench
