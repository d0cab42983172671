// Sampling over parts of a vocabulary gives the tokens of sampling over the whole, for the linked backend.
#include "kernels/sampling/sharded_sampling.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "base/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/sampling/sampling_ref.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"
#include "kernels/testing/replay.h"

namespace dflash {
namespace {

using ::testing::ElementsAre;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<int32_t> Reference(const HostMatrix<float>& logits, const std::vector<SamplingParams>& params,
                               const std::vector<int64_t>& positions, int64_t vocabulary) {
  std::vector<int32_t> tokens;
  for (int64_t r = 0; r < logits.rows; ++r) {
    const auto at = static_cast<size_t>(r);
    tokens.push_back(SampleRef(&logits.values[at * static_cast<size_t>(logits.cols)], vocabulary, params[at],
                               positions[at]));
  }
  return tokens;
}

// The ranks of a group one after another; an all-gather is a place in an array. Everything is captured and
// replayed.
class Parts {
 public:
  Parts(const HostMatrix<float>& logits, int64_t parts, int64_t vocabulary)
      : stream_(Stream::Create({.threads = 2}).value()),
        parts_(parts),
        rows_(logits.rows),
        width_((logits.cols + parts - 1) / parts),
        vocabulary_(vocabulary) {
    for (int64_t part = 0; part < parts; ++part) {
      HostMatrix<float> own(rows_, width_);  // zeros where the vocabulary is padded: they must never win
      for (int64_t r = 0; r < rows_; ++r) {
        for (int64_t c = 0; c < width_ && part * width_ + c < logits.cols; ++c)
          own.At(r, c) = logits.At(r, part * width_ + c);
      }
      logits_.push_back(DeviceMatrix::Input(own, stream_, /*extra_stride=*/3));
    }
  }

  std::vector<int32_t> SampleLists(const std::vector<SamplingParams>& params,
                                   const std::vector<int64_t>& positions, int64_t count) {
    DeviceArray<SamplingParams> device_params(params, stream_);
    DeviceArray<int64_t> device_positions(positions, stream_);
    DeviceArray<CandidateKey> lists = Lists(count);
    DeviceArray<int32_t> tokens(std::vector<int32_t>(params.size(), -99), stream_);
    Replay([&]() -> absl::Status {
      DFLASH_RETURN_IF_ERROR(List(count, lists));
      return SampleFromLists(lists.data(), parts_, rows_, count, device_params.data(),
                             device_positions.data(), tokens.data(), stream_);
    });
    return tokens.ToHost();
  }

  std::vector<int32_t> Argmax() {
    DeviceArray<CandidateKey> lists = Lists(1);
    DeviceArray<int32_t> tokens(std::vector<int32_t>(static_cast<size_t>(rows_), -99), stream_);
    Replay([&]() -> absl::Status {
      DFLASH_RETURN_IF_ERROR(List(1, lists));
      return SampleFromLists(lists.data(), parts_, rows_, 1, nullptr, nullptr, tokens.data(), stream_);
    });
    return tokens.ToHost();
  }

  std::vector<int32_t> SampleSelected(const std::vector<SamplingParams>& params,
                                      const std::vector<int64_t>& positions) {
    DeviceArray<SamplingParams> device_params(params, stream_);
    DeviceArray<int64_t> device_positions(positions, stream_);
    DeviceArray<CandidateKey> best = Lists(1);
    DeviceArray<RowSelection> selections(std::vector<RowSelection>(params.size()), stream_);
    DeviceArray<uint64_t> sums(std::vector<uint64_t>(static_cast<size_t>(parts_ * rows_ * kDigits), 77),
                               stream_);
    DeviceArray<CandidateKey> draws(std::vector<CandidateKey>(static_cast<size_t>(parts_ * rows_)), stream_);
    DeviceArray<int32_t> tokens(std::vector<int32_t>(params.size(), -99), stream_);
    Replay([&]() -> absl::Status {
      DFLASH_RETURN_IF_ERROR(List(1, best));
      DFLASH_RETURN_IF_ERROR(BeginSelection(best.data(), parts_, rows_, selections.data(), stream_));
      for (SamplingFilter filter : {SamplingFilter::kTopK, SamplingFilter::kTopP}) {
        for (int shift = 56; shift >= 0; shift -= 8) {
          for (int64_t part = 0; part < parts_; ++part) {
            DFLASH_RETURN_IF_ERROR(CountDigits(View(part), part * width_, vocabulary_, device_params.data(),
                                               filter, shift, selections.data(),
                                               sums.data() + part * rows_ * kDigits, stream_));
          }
          DFLASH_RETURN_IF_ERROR(ChooseDigit(sums.data(), parts_, rows_, device_params.data(), filter, shift,
                                             selections.data(), stream_));
        }
      }
      for (int64_t part = 0; part < parts_; ++part) {
        DFLASH_RETURN_IF_ERROR(DrawBelowLimit(View(part), part * width_, vocabulary_, device_params.data(),
                                              device_positions.data(), selections.data(),
                                              draws.data() + part * rows_, stream_));
      }
      return ChooseTokens(draws.data(), parts_, rows_, device_params.data(), selections.data(), tokens.data(),
                          stream_);
    });
    return tokens.ToHost();
  }

 private:
  ConstMatrixView View(int64_t part) { return logits_[static_cast<size_t>(part)].view(); }
  DeviceArray<CandidateKey> Lists(int64_t count) {
    return DeviceArray<CandidateKey>(
        std::vector<CandidateKey>(static_cast<size_t>(parts_ * rows_ * count), 5), stream_);
  }
  absl::Status List(int64_t count, DeviceArray<CandidateKey>& lists) {
    for (int64_t part = 0; part < parts_; ++part) {
      DFLASH_RETURN_IF_ERROR(ListBest(View(part), part * width_, vocabulary_, count,
                                      lists.data() + part * rows_ * count, stream_));
    }
    return absl::OkStatus();
  }
  void Replay(const std::function<absl::Status()>& work) {
    const absl::Status status = CaptureAndReplay(stream_, work);
    EXPECT_TRUE(status.ok()) << status;
  }

  Stream stream_;
  int64_t parts_, rows_, width_, vocabulary_;
  std::vector<DeviceMatrix> logits_;
};

struct Case {
  HostMatrix<float> logits;
  std::vector<SamplingParams> params;
  std::vector<int64_t> positions;
};

// Rows with every combination of filters, ties everywhere; some rows mostly -infinity, one with a NaN.
Case MakeCase(int64_t cols, int64_t vocabulary, const std::vector<int32_t>& top_ks, uint64_t seed) {
  Case made;
  for (int32_t top_k : top_ks) {
    for (float top_p : {1.0f, 0.9f, 0.3f, 0.0f}) {
      for (float min_p : {0.0f, 0.1f, 1.5f}) {
        for (float temperature : {0.0f, 0.7f, 3.0f})
          made.params.push_back({temperature, top_k, top_p, min_p, seed + made.params.size()});
      }
    }
  }
  const auto rows = static_cast<int64_t>(made.params.size());
  made.logits = RandomMatrix<float>(rows, cols, seed, -6, 6);
  for (float& logit : made.logits.values) logit = std::nearbyint(logit * 2) / 2;
  for (int64_t r = 0; r < rows; ++r) {
    made.positions.push_back((r << 33) + 5 * r);
    // Padding columns hold what would win or poison the row, if anybody looked.
    for (int64_t v = vocabulary; v < cols; ++v) made.logits.At(r, v) = v % 2 == 0 ? 100.0f : kNan;
    if (r % 7 == 3) {
      for (int64_t v = 0; v < vocabulary; ++v) {
        if (v % 5 != 2) made.logits.At(r, v) = -kInf;
      }
    }
  }
  for (int64_t v = 0; v < vocabulary; ++v) made.logits.At(1, v) = -kInf;
  made.logits.At(2, vocabulary / 2) = kNan;
  made.logits.At(4, vocabulary - 1) = kInf;
  return made;
}

TEST(ShardedSamplingTest, ListsGiveTheTokensOfTheWhole) {
  for (int64_t parts : {1, 2, 4, 8}) {
    for (int64_t vocabulary : {1, 9, 70, 131, 1000}) {
      SCOPED_TRACE(::testing::Message() << parts << " parts of " << vocabulary);
      const Case made =
          MakeCase(vocabulary + 3, vocabulary, {1, 5, 20, 64}, static_cast<uint64_t>(vocabulary));
      Parts group(made.logits, parts, vocabulary);
      EXPECT_EQ(group.SampleLists(made.params, made.positions, kMaxListed),
                Reference(made.logits, made.params, made.positions, vocabulary));
    }
  }
}

TEST(ShardedSamplingTest, SelectionGivesTheTokensOfTheWhole) {
  for (int64_t parts : {1, 2, 4, 8}) {
    for (int64_t vocabulary : {1, 9, 131, 1000}) {
      SCOPED_TRACE(::testing::Message() << parts << " parts of " << vocabulary);
      const Case made =
          MakeCase(vocabulary + 3, vocabulary, {0, 1, 20, 65, 300, 5000}, static_cast<uint64_t>(vocabulary));
      Parts group(made.logits, parts, vocabulary);
      EXPECT_EQ(group.SampleSelected(made.params, made.positions),
                Reference(made.logits, made.params, made.positions, vocabulary));
    }
  }
}

// Smooth logits of a large vocabulary: no ties help, nuclei are long.
TEST(ShardedSamplingTest, LongNucleiAreEqual) {
  const int64_t vocabulary = 20000;
  std::vector<SamplingParams> params;
  std::vector<int64_t> positions;
  for (float top_p : {0.999f, 0.95f, 0.5f}) {
    for (int32_t top_k : {0, 3000}) {
      params.push_back({1.3f, top_k, top_p, 0, params.size()});
      positions.push_back(static_cast<int64_t>(1000 * params.size()));
    }
  }
  const HostMatrix<float> logits =
      RandomMatrix<float>(static_cast<int64_t>(params.size()), vocabulary, 11, -3, 3);
  const std::vector<int32_t> expected = Reference(logits, params, positions, vocabulary);
  for (int64_t parts : {1, 3, 8}) {
    Parts group(logits, parts, vocabulary);
    EXPECT_EQ(group.SampleSelected(params, positions), expected) << parts;
  }
}

// The models' vocabulary and its padded columns: peaked rows, whose candidates are few, and flat ones.
TEST(ShardedSamplingTest, TheModelsVocabularyGivesTheTokensOfTheWhole) {
  constexpr int64_t kVocabulary = 248077, kColumns = 248320;
  for (const bool lists : {true, false}) {
    std::vector<SamplingParams> params = {{0, 0, 1, 0, 1}, {0.7f, 20, 0.8f, 0, 2}, {1, 64, 0.95f, 0.1f, 3}};
    if (!lists) {
      params = {{0, 0, 1, 0, 1},     {1, 0, 0.95f, 0, 4},      {1, 0, 1, 0.05f, 6},
                {1, 3000, 1, 0, 8},  {1.5f, 0, 0.999f, 0, 7},  {1, 1 << 20, 0.5f, 0, 10},
                {0.7f, 20, 0.8f, 0}, {3, 2048, 0.3f, 0.1f, 12}};
    }
    const auto rows = static_cast<int64_t>(params.size());
    std::vector<int64_t> positions;
    for (int64_t r = 0; r < rows; ++r) positions.push_back((r << 33) + 977 * r);
    for (const float spread : {0.5f, 10.0f}) {
      HostMatrix<float> logits = RandomMatrix<float>(rows, kColumns, 13, -1, 1);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t v = 0; v < kColumns; ++v) {
          float& logit = logits.At(r, v);
          logit = v < kVocabulary ? spread * logit * logit * logit : 99.0f;
        }
      }
      const std::vector<int32_t> expected = Reference(logits, params, positions, kVocabulary);
      for (const int64_t parts : {1, 2, 8}) {
        SCOPED_TRACE(::testing::Message() << parts << " parts, spread " << spread);
        Parts group(logits, parts, kVocabulary);
        EXPECT_EQ(lists ? group.SampleLists(params, positions, kMaxListed)
                        : group.SampleSelected(params, positions),
                  expected);
      }
    }
  }
}

TEST(ShardedSamplingTest, EqualLogitsGoToTheLowerIdAcrossParts) {
  HostMatrix<float> logits(3, 8);
  logits.values = {0,     1,  2,  3,  3,    2,  1,  0,  // 3 and 4 are equal: the first is in part 0
                   5,     0,  0,  0,  0,    0,  5,  5,  //
                   -0.0f, -1, -1, -1, 0.0f, -1, -1, -1};
  Parts group(logits, 2, 8);
  EXPECT_THAT(group.Argmax(), ElementsAre(3, 0, 0));
}

TEST(ShardedSamplingTest, ListsAreSortedAndPadded) {
  const Stream stream = Stream::Create({.threads = 1}).value();
  HostMatrix<float> logits(4, 4);
  logits.values = {1, 3, 3, -kInf, -kInf, -kInf, -kInf, -kInf, 0, kNan, 1, 2, 0, kInf, 1, 2};
  const DeviceMatrix device = DeviceMatrix::Input(logits, stream);
  DeviceArray<CandidateKey> keys(std::vector<CandidateKey>(4 * 5, 7), stream);
  ASSERT_TRUE(ListBest(device.view(), 10, 14, 5, keys.data(), stream).ok());
  const std::vector<CandidateKey> lists = keys.ToHost();
  EXPECT_EQ(lists[0] & 0xffffffff, 11u);
  EXPECT_EQ(lists[1] & 0xffffffff, 12u);
  EXPECT_EQ(lists[2] & 0xffffffff, 10u);
  EXPECT_LT(lists[0], lists[1]);
  EXPECT_LT(lists[1], lists[2]);
  EXPECT_EQ(lists[3], kNoCandidate);
  EXPECT_EQ(lists[4], kNoCandidate);
  EXPECT_EQ(lists[5], kNoCandidate);
  EXPECT_EQ(lists[10], kUnusableRow);
  EXPECT_EQ(lists[15], kUnusableRow);
  // The vocabulary ends inside the part, then before it.
  ASSERT_TRUE(ListBest(device.view(), 10, 11, 5, keys.data(), stream).ok());
  EXPECT_EQ(keys.ToHost()[0] & 0xffffffff, 10u);
  EXPECT_EQ(keys.ToHost()[1], kNoCandidate);
  ASSERT_TRUE(ListBest(device.view(), 10, 10, 5, keys.data(), stream).ok());
  EXPECT_EQ(keys.ToHost()[0], kNoCandidate);
  EXPECT_EQ(keys.ToHost()[10], kNoCandidate);
}

TEST(ShardedSamplingTest, ReachOfParameters) {
  EXPECT_EQ(ReachOf({.temperature = 0, .top_k = 0, .top_p = 0.5f}), SamplingReach::kBest);
  EXPECT_EQ(ReachOf({.temperature = 1, .top_k = 1}), SamplingReach::kList);
  EXPECT_EQ(ReachOf({.temperature = 1, .top_k = 64, .top_p = 0.5f}), SamplingReach::kList);
  EXPECT_EQ(ReachOf({.temperature = 1, .top_k = 65}), SamplingReach::kAll);
  EXPECT_EQ(ReachOf({.temperature = 1, .top_k = 0}), SamplingReach::kAll);
  EXPECT_EQ(ReachOf({.temperature = 1, .top_k = 0, .top_p = 0.5f}), SamplingReach::kAll);
}

TEST(ShardedSamplingTest, RefusesWhatDoesNotFit) {
  const Stream stream = Stream::Create({.threads = 1}).value();
  const DeviceMatrix logits = DeviceMatrix::Input(HostMatrix<float>(1, 4), stream);
  const DeviceMatrix narrow = DeviceMatrix::Input(HostMatrix<bf16>(1, 4), stream);
  DeviceArray<CandidateKey> keys(std::vector<CandidateKey>(kMaxListed), stream);
  DeviceArray<int32_t> token({0}, stream);
  const auto list = [&](ConstMatrixView view, int64_t first_id, int64_t vocabulary, int64_t count) {
    return ListBest(view, first_id, vocabulary, count, keys.data(), stream).code();
  };
  EXPECT_EQ(list(logits.view(), 0, 4, kMaxListed), absl::StatusCode::kOk);
  EXPECT_EQ(list(narrow.view(), 0, 4, 1), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(list(logits.view(), -1, 4, 1), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(list(logits.view(), 0, kMaxVocabulary + 1, 1), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(list(logits.view(), 0, 4, kMaxListed + 1), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(SampleFromLists(keys.data(), 0, 1, 1, nullptr, nullptr, token.data(), stream).code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dflash
