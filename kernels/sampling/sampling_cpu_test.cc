// What the CPU backend promises beyond sampling.h: the same tokens for every instruction set and thread
// count.
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/sampling/sampling.h"
#include "kernels/testing/cpu_variants.h"
#include "kernels/testing/host_matrix.h"

namespace dflash {
namespace {

TEST(SamplingCpuTest, SameTokensForEveryInstructionSetAndThreadCount) {
  std::vector<SamplingParams> params;
  for (int32_t top_k : {0, 30}) {
    for (float top_p : {1.0f, 0.9f}) {
      for (float min_p : {0.0f, 0.1f}) {
        for (float temperature : {0.0f, 0.7f, 3.0f}) {
          params.push_back({temperature, top_k, top_p, min_p, params.size()});
        }
      }
    }
  }
  const auto rows = static_cast<int64_t>(params.size());
  std::vector<int64_t> positions;
  for (int64_t r = 0; r < rows; ++r) positions.push_back((r << 33) + 5 * r);
  for (int64_t vocabulary : {1, 15, 64, 1003}) {
    HostMatrix<float> logits = RandomMatrix<float>(rows, vocabulary, 3, -5, 5);
    for (float& logit : logits.values) logit = std::nearbyint(logit * 4) / 4;  // ties
    for (int64_t v = 1; v < vocabulary; v += 3) logits.At(2, v) = -std::numeric_limits<float>::infinity();
    if (vocabulary > 20) logits.At(5, 17) = std::numeric_limits<float>::quiet_NaN();
    ExpectEqualOnAllCpuVariants([&](const Stream& stream) {
      std::vector<int32_t> tokens(static_cast<size_t>(rows));
      EXPECT_TRUE(
          SampleRows(logits.view(), params.data(), positions.data(), vocabulary, tokens.data(), stream).ok());
      return HostMatrix<float>(1, rows, std::vector<float>(tokens.begin(), tokens.end()));
    });
  }
}

}  // namespace
}  // namespace dflash
