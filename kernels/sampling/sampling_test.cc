// The contract of sampling.h against a reference, for the linked backend.
#include "kernels/sampling/sampling.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/sampling/sampling_ref.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"

namespace dflash {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr auto kBad = absl::StatusCode::kInvalidArgument;

std::vector<int32_t> Sample(const HostMatrix<float>& logits, const std::vector<SamplingParams>& params,
                            const std::vector<int64_t>& positions, int64_t vocabulary, int threads = 2) {
  const Stream stream = Stream::Create({.threads = threads}).value();
  const DeviceMatrix device_logits = DeviceMatrix::Input(logits, stream, /*extra_stride=*/3);
  DeviceArray<SamplingParams> device_params(params, stream);
  DeviceArray<int64_t> device_positions(positions, stream);
  DeviceArray<int32_t> tokens(std::vector<int32_t>(static_cast<size_t>(logits.rows), -99), stream);
  const absl::Status status = SampleRows(device_logits.view(), device_params.data(), device_positions.data(),
                                         vocabulary, tokens.data(), stream);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return tokens.ToHost();
}

// ---- The reference and the noise against literals.

TEST(GumbelTest, FollowsTheFormulaInDouble) {
  // u = 2^-33 gives the largest noise, 33 ln 2; u is capped at 1 - 2^-24, where E = 24 ln 2.
  EXPECT_NEAR(GumbelNoiseF32(0), 33 * std::log(2.0), 1e-5);
  EXPECT_NEAR(GumbelNoiseF32(0xffffffffu), -std::log(24 * std::log(2.0)), 1e-5);
  EXPECT_NEAR(GumbelNoiseF32(0x80000000u), -std::log(std::log(2.0)), 1e-6);
  std::mt19937 generator(3);
  for (int i = 0; i < 10000; ++i) {
    const uint32_t x = generator() >> (i % 32);
    const double u = std::min((x + 0.5) * 0x1p-32, 1 - 0x1p-24);
    // Near u = 1, where the noise is at its lowest and rarely wins, a float32 u has few digits left of 1 - u.
    const double tolerance = 1e-6 + 0x1p-23 / (1 - u) / -std::log1p(-u);
    ASSERT_NEAR(GumbelNoiseF32(x), -std::log(-std::log1p(-u)), tolerance) << x;
  }
}

TEST(SurvivorsTest, LiteralValues) {
  // Probabilities 1/8, 1/2, 1/8, 1/4.
  const float logits[4] = {-2.0794415f, -0.6931472f, -2.0794415f, -1.3862944f};
  const auto survivors = [&](int32_t top_k, float top_p, float min_p) {
    return SurvivorsRef(logits, 4, {.temperature = 1, .top_k = top_k, .top_p = top_p, .min_p = min_p});
  };
  EXPECT_THAT(survivors(0, 1, 0), ElementsAre(1, 3, 0, 2));
  EXPECT_THAT(survivors(3, 1, 0), ElementsAre(1, 3, 0));  // the tie goes to the lower id
  EXPECT_THAT(survivors(9, 1, 0), ElementsAre(1, 3, 0, 2));
  EXPECT_THAT(survivors(0, 0.49f, 0), ElementsAre(1));
  EXPECT_THAT(survivors(0, 0.51f, 0), ElementsAre(1, 3));
  EXPECT_THAT(survivors(0, 0.74f, 0), ElementsAre(1, 3));
  EXPECT_THAT(survivors(0, 0.76f, 0), ElementsAre(1, 3, 0));
  EXPECT_THAT(survivors(0, 0, 0), ElementsAre(1));
  EXPECT_THAT(survivors(2, 0.66f, 0), ElementsAre(1));  // of 2/3 and 1/3: renormalized after top-k
  EXPECT_THAT(survivors(2, 0.68f, 0), ElementsAre(1, 3));
  EXPECT_THAT(survivors(0, 1, 0.24f), ElementsAre(1, 3, 0, 2));
  EXPECT_THAT(survivors(0, 1, 0.26f), ElementsAre(1, 3));
  EXPECT_THAT(survivors(0, 1, 0.51f), ElementsAre(1));
  EXPECT_THAT(survivors(0, 1, 1), ElementsAre(1));
  const auto hotter = SurvivorsRef(logits, 4, {.temperature = 2, .top_p = 0.51f});  // 2 : 1.41 : 1 : 1
  EXPECT_THAT(hotter, ElementsAre(1, 3));
  const float unusable[3] = {0, kNan, 1}, infinite[3] = {0, kInf, 1}, empty[3] = {-kInf, -kInf, -kInf};
  EXPECT_THAT(SurvivorsRef(unusable, 3, {.temperature = 1}), IsEmpty());
  EXPECT_THAT(SurvivorsRef(infinite, 3, {.temperature = 1}), IsEmpty());
  EXPECT_THAT(SurvivorsRef(empty, 3, {.temperature = 1}), IsEmpty());
}

// ---- The operation against the reference, token for token.

std::vector<SamplingParams> ManyParams() {
  std::vector<SamplingParams> params;
  for (float temperature : {0.0f, 0.3f, 1.0f, 5.0f, 1e-30f}) {
    for (int32_t top_k : {0, 1, 20, 700, 1 << 30}) {
      for (float top_p : {1.0f, 0.95f, 0.5f, 0.0f}) {
        for (float min_p : {0.0f, 0.02f, 1.0f}) {
          params.push_back({temperature, top_k, top_p, min_p, 1000 + params.size()});
        }
      }
    }
  }
  return params;
}

TEST(SamplingTest, EqualsTheReference) {
  const std::vector<SamplingParams> params = ManyParams();
  const auto rows = static_cast<int64_t>(params.size());
  for (int64_t vocabulary : {1, 2, 5, 63, 300, 2049}) {
    for (float spread : {0.5f, 12.0f}) {
      SCOPED_TRACE(testing::Message() << "vocabulary " << vocabulary << ", spread " << spread);
      // Rounded to eighths: many ties, also at the edges of the filters.
      HostMatrix<float> logits = RandomMatrix<float>(rows, vocabulary + 2, 5, -spread, spread);
      for (float& logit : logits.values) logit = std::nearbyint(logit * 8) / 8;
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t v = 3; v < vocabulary; v += 7) logits.At(r, v) = -kInf;
        logits.At(r, vocabulary) = kNan;  // padding rows of the head do not count
        logits.At(r, vocabulary + 1) = kInf;
      }
      std::vector<int64_t> positions;
      for (int64_t r = 0; r < rows; ++r) positions.push_back(r * 977);
      const std::vector<int32_t> tokens = Sample(logits, params, positions, vocabulary);
      for (int64_t r = 0; r < rows; ++r) {
        const auto at = static_cast<size_t>(r);
        ASSERT_EQ(tokens[at], SampleRef(logits.Row(r), vocabulary, params[at], positions[at]))
            << "temperature " << params[at].temperature << " top_k " << params[at].top_k << " top_p "
            << params[at].top_p << " min_p " << params[at].min_p;
      }
    }
  }
}

// Flat logits: the prefix of top-p is most of the vocabulary.
TEST(SamplingTest, EqualsTheReferenceWhenTopPKeepsThousands) {
  const int64_t vocabulary = 20000, rows = 4;
  const HostMatrix<float> logits = RandomMatrix<float>(rows, vocabulary, 5, -1, 1);
  const std::vector<SamplingParams> params = {
      {1, 0, 0.999f, 0, 1}, {1, 0, 0.3f, 0.5f, 2}, {1, 15000, 0.9f, 0, 3}, {0.01f, 0, 0.9f, 0, 4}};
  const std::vector<int32_t> tokens = Sample(logits, params, {1, 2, 3, 4}, vocabulary);
  for (int64_t r = 0; r < rows; ++r) {
    const auto at = static_cast<size_t>(r);
    EXPECT_EQ(tokens[at], SampleRef(logits.Row(r), vocabulary, params[at], r + 1));
  }
}

TEST(SamplingTest, GreedyTakesTheLowestIdOfTheHighest) {
  const HostMatrix<float> logits(5, 6, {1,     3,     2,      3,     0,     9,  //
                                        -5,    -5,    -5,     -5,    -5,    9,  //
                                        -0.0f, 0,     0,      -1,    0,     9,  //
                                        -kInf, -kInf, -1e38f, -kInf, -kInf, 9, 0, 1, 2, 3, 4, kNan});
  EXPECT_THAT(Sample(logits, std::vector<SamplingParams>(5), std::vector<int64_t>(5), 5),
              ElementsAre(1, 0, 0, 2, 4));
}

// A position found by search, at which noise and logits add up to the same float for both ids.
TEST(SamplingTest, EqualScoresGoToTheLowestId) {
  const HostMatrix<float> logits(1, 2, {-0.5f, 0});
  const auto noise = [](int32_t id) {
    return GumbelNoiseF32(NoiseWord(1, 157065433, id, NoiseStream::kTargetChoice));
  };
  ASSERT_EQ(noise(0) - 0.5f, noise(1));
  for (int32_t top_k : {0, 2}) {
    EXPECT_THAT(Sample(logits, {{1, top_k, 1, 0, 1}}, {157065433}, 2), ElementsAre(0));
  }
}

TEST(SamplingTest, RowsWithoutAChoiceFailAlone) {
  const HostMatrix<float> logits(4, 3, {1, kNan, 0, -kInf, -kInf, -kInf, kInf, 0, 0, 2, 1, -kInf});
  for (float temperature : {0.0f, 1.0f}) {
    for (int32_t top_k : {0, 2}) {
      const std::vector<SamplingParams> params(4, {.temperature = temperature, .top_k = top_k, .seed = 6});
      const std::vector<int32_t> tokens = Sample(logits, params, std::vector<int64_t>(4, 5), 3);
      EXPECT_EQ(tokens[0], -1);
      EXPECT_EQ(tokens[1], -1);
      EXPECT_EQ(tokens[2], -1);
      EXPECT_EQ(tokens[3], SampleRef(logits.Row(3), 3, params[3], 5));
      EXPECT_GE(tokens[3], 0);
    }
  }
}

// A token depends on logits, parameters, seed and position: not on the row, its company or the threads.
TEST(SamplingTest, RowsDoNotMeet) {
  const int64_t rows = 24, vocabulary = 500;
  const HostMatrix<float> logits = RandomMatrix<float>(rows, vocabulary, 5, -4, 4);
  std::vector<SamplingParams> params;
  std::vector<int64_t> positions;
  for (int64_t r = 0; r < rows; ++r) {
    params.push_back({1, r % 2 == 0 ? 0 : 40, r % 3 == 0 ? 0.9f : 1.0f, 0, static_cast<uint64_t>(r % 5)});
    positions.push_back(r % 7);
  }
  const std::vector<int32_t> together = Sample(logits, params, positions, vocabulary, 1);
  EXPECT_EQ(Sample(logits, params, positions, vocabulary, 3), together);
  for (int64_t r = 0; r < rows; ++r) {
    const auto at = static_cast<size_t>(r);
    EXPECT_THAT(Sample(logits.Rows(r, 1), {params[at]}, {positions[at]}, vocabulary),
                ElementsAre(together[at]));
  }
}

TEST(SamplingTest, SeedAndPositionChangeTheDraw) {
  const int64_t rows = 64;
  const HostMatrix<float> logits(rows, 1000);  // uniform
  std::vector<SamplingParams> same(static_cast<size_t>(rows), {.temperature = 1, .seed = 8}), seeds = same;
  std::vector<int64_t> fixed(static_cast<size_t>(rows), 3), positions = fixed;
  for (int64_t r = 0; r < rows; ++r) {
    seeds[static_cast<size_t>(r)].seed = static_cast<uint64_t>(r) << 32;
    positions[static_cast<size_t>(r)] = r;
  }
  const auto distinct = [](std::vector<int32_t> tokens) {
    std::sort(tokens.begin(), tokens.end());
    return std::unique(tokens.begin(), tokens.end()) - tokens.begin();
  };
  EXPECT_EQ(distinct(Sample(logits, same, fixed, 1000)), 1);
  EXPECT_GT(distinct(Sample(logits, seeds, fixed, 1000)), 50);
  EXPECT_GT(distinct(Sample(logits, same, positions, 1000)), 50);
}

// ---- The law. Fixed seeds, so that a verdict is final; the bounds are about six standard deviations.

double ChiSquare(const std::vector<double>& probabilities, const std::vector<int64_t>& counts) {
  double draws = 0, chi_square = 0;
  for (int64_t count : counts) draws += static_cast<double>(count);
  for (size_t i = 0; i < counts.size(); ++i) {
    const double expected = draws * probabilities[i], off = static_cast<double>(counts[i]) - expected;
    if (expected == 0) {
      if (counts[i] != 0) return HUGE_VAL;
      continue;
    }
    chi_square += off * off / expected;
  }
  return chi_square;
}

double Bound(size_t cells) {
  const auto freedom = static_cast<double>(cells - 1);
  return freedom + 6 * std::sqrt(2 * freedom) + 12;
}

// softmax(logits / T) over the survivors, in double.
std::vector<double> Law(const std::vector<float>& logits, const SamplingParams& params) {
  std::vector<double> law(logits.size(), 0);
  double sum = 0;
  for (int32_t id : SurvivorsRef(logits.data(), static_cast<int64_t>(logits.size()), params)) {
    const auto at = static_cast<size_t>(id);
    sum += law[at] = std::exp(static_cast<double>(logits[at]) / static_cast<double>(params.temperature));
  }
  for (double& probability : law) probability /= sum;
  return law;
}

std::vector<int32_t> DrawMany(const std::vector<float>& logits, const SamplingParams& params, int64_t draws) {
  HostMatrix<float> rows(draws, static_cast<int64_t>(logits.size()));
  std::vector<int64_t> positions;
  for (int64_t r = 0; r < draws; ++r) {
    std::copy(logits.begin(), logits.end(), rows.Row(r));
    positions.push_back(r);
  }
  return Sample(rows, std::vector<SamplingParams>(static_cast<size_t>(draws), params), positions, rows.cols);
}

TEST(SamplingLawTest, DrawsFollowTheFilteredDistribution) {
  const std::vector<float> logits = {0.3f, -1.2f, 2.1f, 2.1f, -0.4f, 1.0f, -4.0f, 0.0f, 1.4f};
  for (const SamplingParams& params : std::vector<SamplingParams>{{1, 0, 1, 0, 1},
                                                                  {0.5f, 0, 1, 0, 2},
                                                                  {3, 0, 1, 0, 3},
                                                                  {1, 4, 1, 0, 4},
                                                                  {1, 0, 0.8f, 0, 5},
                                                                  {1, 0, 1, 0.2f, 6},
                                                                  {1.5f, 7, 0.95f, 0.05f, 7}}) {
    SCOPED_TRACE(params.seed);
    std::vector<int64_t> counts(logits.size(), 0);
    for (int32_t token : DrawMany(logits, params, 40000)) {
      ASSERT_GE(token, 0);
      ++counts[static_cast<size_t>(token)];
    }
    EXPECT_LT(ChiSquare(Law(logits, params), counts), Bound(logits.size()));
    // The test can fail: one token a fifth too likely.
    std::vector<float> wrong = logits;
    wrong[2] += 0.2f * params.temperature;
    EXPECT_GT(ChiSquare(Law(wrong, params), counts), Bound(logits.size()));
  }
}

TEST(SamplingLawTest, NeighbouringPositionsAreIndependent) {
  const std::vector<float> logits = {0, 0.7f, -0.5f};
  const SamplingParams params = {1, 0, 1, 0, 77};
  const std::vector<double> law = Law(logits, params);
  const std::vector<int32_t> tokens = DrawMany(logits, params, 40000);
  std::vector<int64_t> counts(9, 0);
  std::vector<double> joint;
  for (size_t i = 0; i + 1 < tokens.size(); i += 2)
    ++counts[static_cast<size_t>(tokens[i] * 3 + tokens[i + 1])];
  for (double first : law) {
    for (double second : law) joint.push_back(first * second);
  }
  EXPECT_LT(ChiSquare(joint, counts), Bound(9));
}

TEST(SamplingTest, RefusesShapesThatDisagree) {
  const Stream stream = Stream::Create({.threads = 1}).value();
  const DeviceMatrix logits = DeviceMatrix::Input(HostMatrix<float>(1, 4), stream);
  const DeviceMatrix narrow = DeviceMatrix::Input(HostMatrix<bf16>(1, 4), stream);
  DeviceArray<SamplingParams> params({{}}, stream);
  DeviceArray<int64_t> position({0}, stream);
  DeviceArray<int32_t> token({0}, stream);
  const auto sample = [&](ConstMatrixView view, int64_t vocabulary) {
    return SampleRows(view, params.data(), position.data(), vocabulary, token.data(), stream).code();
  };
  const void* data = logits.view().data;
  EXPECT_EQ(sample(logits.view(), 4), absl::StatusCode::kOk);
  EXPECT_EQ(sample(logits.view(), 5), kBad);
  EXPECT_EQ(sample(logits.view(), 0), kBad);
  EXPECT_EQ(sample(narrow.view(), 4), kBad);
  EXPECT_EQ(sample(ConstMatrixView(data, DType::kF32, 0, kMaxVocabulary + 1, kMaxVocabulary + 1),
                   kMaxVocabulary + 1),
            kBad);
  EXPECT_EQ(sample(ConstMatrixView(data, DType::kF32, 0, 4, 4), 4), absl::StatusCode::kOk);
}

}  // namespace
}  // namespace dflash
