// main() of gpu_tests: without a GPU the program says why and ends with the code that CTest counts as
// skipped.
#include <cstdio>
#include <cstdlib>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "kernels/device/stream.h"

namespace {
constexpr int kSkipped = 77;  // SKIP_RETURN_CODE of the test
}

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  // Ranks of a group share the GPU here, and their kernels wait for each other. A kernel that is loaded at
  // its first use, or stands in line behind one that waits, would be waited for in vain.
  setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  if (GTEST_FLAG_GET(list_tests)) return RUN_ALL_TESTS();
  if (const auto stream = dflash::Stream::Create({}); !stream.ok()) {
    const bool has_gpu = !absl::IsUnavailable(stream.status());  // but has no memory left, say
    std::printf("%s: %s\n", has_gpu ? "failed" : "skipped", stream.status().ToString().c_str());
    return has_gpu ? EXIT_FAILURE : kSkipped;
  }
  return RUN_ALL_TESTS();
}
