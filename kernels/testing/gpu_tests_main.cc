// main() of gpu_tests: without a GPU the program says why and ends with the code that CTest counts as
// skipped.
#include <cstdio>

#include "gtest/gtest.h"
#include "kernels/device/stream.h"

namespace {
constexpr int kSkipped = 77;  // SKIP_RETURN_CODE of the test
}

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (const auto stream = dflash::Stream::Create({}); !stream.ok()) {
    std::printf("skipped: %s\n", stream.status().ToString().c_str());
    return kSkipped;
  }
  return RUN_ALL_TESTS();
}
