// The drafter's choice against the reference, whole and in parts, for the linked backend.
#include "kernels/sampling/draft_choice.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/sampling/draft_choice_ref.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"
#include "kernels/testing/replay.h"

namespace dflash {
namespace {

using ::testing::ElementsAre;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr auto kBad = absl::StatusCode::kInvalidArgument;

struct Choices {
  std::vector<int32_t> tokens;
  std::vector<float> confidences;
};

// The ranks of a group one after another; an all-gather is a place in an array.
Choices Choose(const HostMatrix<float>& logits, int64_t parts, int64_t vocabulary) {
  const Stream stream = Stream::Create({.threads = 2}).value();
  const int64_t width = (logits.cols + parts - 1) / parts;
  const auto rows = static_cast<size_t>(logits.rows);
  DeviceArray<DraftCandidate> candidates(std::vector<DraftCandidate>(rows * static_cast<size_t>(parts)),
                                         stream);
  for (int64_t part = 0; part < parts; ++part) {
    HostMatrix<float> own(logits.rows, width);  // zeros where the vocabulary is padded: they must never count
    for (int64_t r = 0; r < logits.rows; ++r) {
      for (int64_t c = 0; c < width && part * width + c < logits.cols; ++c)
        own.At(r, c) = logits.At(r, part * width + c);
    }
    const DeviceMatrix device = DeviceMatrix::Input(own, stream, /*extra_stride=*/3);
    EXPECT_TRUE(CaptureAndReplay(stream, [&] {
                  return ListDrafts(device.view(), part * width, vocabulary,
                                    candidates.data() + part * logits.rows, stream);
                }).ok());
  }
  DeviceArray<int32_t> tokens(std::vector<int32_t>(rows, -99), stream);
  DeviceArray<float> confidences(std::vector<float>(rows, -99), stream);
  EXPECT_TRUE(CaptureAndReplay(stream, [&] {
                return ChooseDrafts(candidates.data(), parts, logits.rows, tokens.data(), confidences.data(),
                                    stream);
              }).ok());
  DeviceArray<int32_t> alone(std::vector<int32_t>(rows, -99), stream);
  EXPECT_TRUE(ChooseDrafts(candidates.data(), parts, logits.rows, alone.data(), nullptr, stream).ok());
  Choices choices = {.tokens = tokens.ToHost(), .confidences = confidences.ToHost()};
  EXPECT_EQ(alone.ToHost(), choices.tokens);
  return choices;
}

TEST(DraftChoiceTest, FollowsTheReferenceInAnyNumberOfParts) {
  for (const int64_t vocabulary : {1, 17, 4096, 20011}) {
    // From flat to peaked, with ties, and padding that would win.
    HostMatrix<float> logits = RandomMatrix<float>(33, vocabulary + 13, 7, -1, 1);
    for (int64_t r = 0; r < logits.rows; ++r) {
      for (int64_t v = 0; v < logits.cols; ++v) {
        float& logit = logits.At(r, v);
        logit = v < vocabulary ? std::nearbyint(logit * static_cast<float>(r) * 8) / 8 : 99.0f;
        if (r == 4 && v % 3 == 1) logit = -kInf;
        if (r == 5) logit += 3000;  // sums must not overflow
      }
    }
    for (const int64_t parts : {1, 2, 8}) {
      SCOPED_TRACE(::testing::Message() << vocabulary << " tokens in " << parts << " parts");
      const Choices choices = Choose(logits, parts, vocabulary);
      for (int64_t r = 0; r < logits.rows; ++r) {
        const DraftChoiceRef expected = ChooseDraftRef(logits.Row(r), vocabulary);
        const auto at = static_cast<size_t>(r);
        EXPECT_EQ(choices.tokens[at], expected.token) << "row " << r;
        // A float32 sum of so many positive terms.
        EXPECT_NEAR(choices.confidences[at], expected.confidence, 1e-4 * expected.confidence) << "row " << r;
      }
    }
  }
}

// The models' vocabulary and its padded columns, flat and peaked, equal logits far apart.
TEST(DraftChoiceTest, FollowsTheReferenceAtTheModelsVocabulary) {
  constexpr int64_t kVocabulary = 248077, kColumns = 248320;
  HostMatrix<float> logits = RandomMatrix<float>(4, kColumns, 8, -1, 1);
  for (int64_t r = 0; r < logits.rows; ++r) {
    for (int64_t v = 0; v < kColumns; ++v) {
      float& logit = logits.At(r, v);
      logit = v < kVocabulary ? static_cast<float>(1 + 4 * r) * logit * logit * logit : 99.0f;
    }
  }
  logits.At(1, 17) = logits.At(1, kVocabulary - 1) = 7.0f;
  logits.At(2, kVocabulary - 1) = 12.0f;
  for (const int64_t parts : {1, 2, 4, 8}) {
    const Choices choices = Choose(logits, parts, kVocabulary);
    EXPECT_EQ(choices.tokens[1], 17);
    EXPECT_EQ(choices.tokens[2], kVocabulary - 1);
    for (int64_t r = 0; r < logits.rows; ++r) {
      const DraftChoiceRef expected = ChooseDraftRef(logits.Row(r), kVocabulary);
      const auto at = static_cast<size_t>(r);
      EXPECT_EQ(choices.tokens[at], expected.token) << "row " << r << " in " << parts << " parts";
      EXPECT_NEAR(choices.confidences[at], expected.confidence, 1e-4 * expected.confidence) << "row " << r;
    }
  }
}

TEST(DraftChoiceTest, TakesTheLowestIdOfTheHighest) {
  const HostMatrix<float> logits(5, 6, {1,     3,     2,      3,     0,     9,  //
                                        -5,    -5,    -5,     -5,    -5,    9,  //
                                        -0.0f, 0,     0,      -1,    0,     9,  //
                                        -kInf, -kInf, -1e38f, -kInf, -kInf, 9, 0, 1, 2, 3, 4, kNan});
  for (const int64_t parts : {1, 2, 3}) {
    const Choices choices = Choose(logits, parts, 5);
    EXPECT_THAT(choices.tokens, ElementsAre(1, 0, 0, 2, 4));
    EXPECT_FLOAT_EQ(choices.confidences[1], 0.2f);
    EXPECT_FLOAT_EQ(choices.confidences[3], 1.0f);
  }
}

TEST(DraftChoiceTest, RowsWithoutAChoiceFailAlone) {
  const HostMatrix<float> logits(
      4, 4, {1, kNan, 0, 0, -kInf, -kInf, -kInf, -kInf, kInf, 0, 0, 0, 2, 2, -kInf, -kInf});
  for (const int64_t parts : {1, 2, 4}) {
    const Choices choices = Choose(logits, parts, 4);
    EXPECT_THAT(choices.tokens, ElementsAre(-1, -1, -1, 0));
    EXPECT_THAT(choices.confidences, ElementsAre(0, 0, 0, 0.5f));
  }
}

TEST(DraftChoiceTest, RefusesShapesThatDisagree) {
  const Stream stream = Stream::Create({.threads = 1}).value();
  const DeviceMatrix logits = DeviceMatrix::Input(HostMatrix<float>(1, 4), stream);
  const DeviceMatrix narrow = DeviceMatrix::Input(HostMatrix<bf16>(1, 4), stream);
  DeviceArray<DraftCandidate> candidate({{}}, stream);
  DeviceArray<int32_t> token({0}, stream);
  EXPECT_EQ(ListDrafts(narrow.view(), 0, 4, candidate.data(), stream).code(), kBad);
  EXPECT_EQ(ListDrafts(logits.view(), -1, 4, candidate.data(), stream).code(), kBad);
  EXPECT_EQ(ListDrafts(logits.view(), 0, 0, candidate.data(), stream).code(), kBad);
  EXPECT_EQ(ListDrafts(logits.view(), 0, kMaxVocabulary + 1, candidate.data(), stream).code(), kBad);
  EXPECT_EQ(ChooseDrafts(candidate.data(), 0, 1, token.data(), nullptr, stream).code(), kBad);
  EXPECT_EQ(ChooseDrafts(candidate.data(), 1, -1, token.data(), nullptr, stream).code(), kBad);
}

}  // namespace
}  // namespace dflash
