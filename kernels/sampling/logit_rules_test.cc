// Rules of rows and log probabilities, held against a reference that shares no code with them, for the linked
// backend.
#include "kernels/sampling/logit_rules.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/sampling/log_probs.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"

namespace dflash {
namespace {

using ::testing::ElementsAre;
using ::testing::Eq;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class LogitRulesTest : public ::testing::Test {
 protected:
  HostMatrix<float> Process(const HostMatrix<float>& logits, const std::vector<RowRules>& rows,
                            const std::vector<LogitEdit>& edits, const std::vector<uint32_t>& masks = {},
                            int64_t vocabulary = 0, int64_t first_id = 0) {
    if (vocabulary == 0) vocabulary = first_id + logits.cols;
    const DeviceMatrix device = DeviceMatrix::Input(logits, stream_, /*extra_stride=*/3);
    DeviceArray<RowRules> device_rows(rows, stream_);
    std::vector<LogitEdit> some_edits = edits;
    if (some_edits.empty()) some_edits.emplace_back();
    DeviceArray<LogitEdit> device_edits(some_edits, stream_);
    std::vector<uint32_t> some_masks = masks;
    if (some_masks.empty()) some_masks.emplace_back();
    DeviceArray<uint32_t> device_masks(some_masks, stream_);
    const int64_t words = (vocabulary + 31) / 32;
    const bool restricts = std::any_of(rows.begin(), rows.end(),
                                       [](const RowRules& row) { return row.mask >= 0 || row.only >= 0; });
    const absl::Status status = ProcessLogits({.rows = device_rows.data(),
                                               .edits = device_edits.data(),
                                               .masks = masks.empty() ? nullptr : device_masks.data(),
                                               .mask_words = words,
                                               .restricts = restricts},
                                              first_id, vocabulary, device.view(), stream_);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(device.GuardsIntact());
    return device.ToHost();
  }

  Stream stream_ = *Stream::Create({.threads = 2});
};

// Literals by hand: (2 + 1) / 1.5 - 0.25, (-1 + 0) * 1.5 - 0.5, 0 * 1.5, bias that changes the sign.
TEST_F(LogitRulesTest, OneTokensNumbers) {
  const HostMatrix<float> logits(1, 6, {2, -1, 0, -1, 3, 7});
  const std::vector<LogitEdit> edits = {
      {0, 1, 1.5f, 0.25f}, {1, 0, 1.5f, 0.5f}, {2, 0, 1.5f, 0}, {3, 3, 2, 0}, {4, -kInf, 2, 1}};
  const HostMatrix<float> out = Process(logits, {{.shared_begin = 0, .shared_end = 5}}, edits);
  EXPECT_THAT(out.values, ElementsAre(1.75f, -2.f, 0.f, 1.f, -kInf, 7.f));
}

TEST_F(LogitRulesTest, OwnEditsReplaceSharedOnes) {
  const HostMatrix<float> logits(3, 4, {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1});
  // Shared: 0 and 2 lose a half. Row 0: nothing of its own. Row 1: 2 loses 4. Row 2: only its own.
  const std::vector<LogitEdit> edits = {{0, 0, 1, 0.5f}, {2, 0, 1, 0.5f}, {1, 0, 1, 2}, {2, 0, 1, 4}};
  const HostMatrix<float> out = Process(logits,
                                        {{.shared_begin = 0, .shared_end = 2},
                                         {.shared_begin = 0, .shared_end = 2, .own_begin = 2, .own_end = 4},
                                         {.own_begin = 3, .own_end = 4}},
                                        edits);
  EXPECT_THAT(out.values, ElementsAre(0.5f, 1, 0.5f, 1, 0.5f, -1, -3, 1, 1, 1, -3, 1));
}

TEST_F(LogitRulesTest, MasksAndTheOnlyToken) {
  const HostMatrix<float> logits(3, 40, std::vector<float>(120, 2));
  std::vector<uint32_t> masks(4, 0);  // two masks of two words
  masks[0] = 1u << 5;
  masks[1] = 1u << 7;  // token 39
  masks[2] = ~0u;
  const HostMatrix<float> out = Process(logits, {{.mask = 0}, {.mask = 1, .only = 6}, {}}, {}, masks);
  for (int64_t c = 0; c < 40; ++c) {
    EXPECT_EQ(out.At(0, c), c == 5 || c == 39 ? 2 : -kInf) << c;
    EXPECT_EQ(out.At(1, c), c == 6 ? 2 : -kInf) << c;
    EXPECT_EQ(out.At(2, c), 2) << c;
  }
}

TEST_F(LogitRulesTest, WhatIsNoNumberStaysNoNumber) {
  const HostMatrix<float> logits(1, 4, {kNan, kInf, 1, -kInf});
  const HostMatrix<float> out = Process(logits, {{.only = 2}}, {});
  EXPECT_TRUE(std::isnan(out.At(0, 0)));
  EXPECT_EQ(out.At(0, 1), kInf);
  EXPECT_EQ(out.At(0, 2), 1);
  EXPECT_EQ(out.At(0, 3), -kInf);
}

// Random rules over rows cut into parts: every part does what a loop over the whole row in double precision
// does.
TEST_F(LogitRulesTest, PartsEqualTheWhole) {
  std::mt19937 random(5);
  const int64_t vocabulary = 1000, columns = 1024, rows = 5;
  for (int trial = 0; trial < 10; ++trial) {
    const HostMatrix<float> logits = RandomMatrix<float>(rows, columns, random(), -8, 8);
    std::vector<RowRules> rules;
    std::vector<LogitEdit> edits;
    std::vector<uint32_t> masks;
    const int64_t words = (vocabulary + 31) / 32;
    HostMatrix<double> expected(rows, columns);
    const auto edit_of = [&](int32_t id) {
      return LogitEdit{.id = id,
                       .bias = random() % 4 == 0 ? -kInf : static_cast<float>(random() % 16) / 8,
                       .repetition = 1 + static_cast<float>(random() % 8) / 8,
                       .penalty = static_cast<float>(random() % 8) / 4};
    };
    const auto apply = [&](const LogitEdit& edit, int64_t r) {
      double x = static_cast<double>(logits.At(r, edit.id)) + edit.bias;
      x = x > 0 ? x / edit.repetition : x * edit.repetition;
      expected.At(r, edit.id) = x - edit.penalty;
    };
    for (int32_t id = 0; id < vocabulary; ++id) {
      if (random() % 3 == 0) edits.push_back(edit_of(id));
    }
    const auto shared = static_cast<int32_t>(edits.size());
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) expected.At(r, c) = logits.At(r, c);
      RowRules rule = {
          .shared_begin = 0, .shared_end = shared, .own_begin = static_cast<int32_t>(edits.size())};
      for (int32_t i = 0; i < shared; ++i) apply(edits[static_cast<size_t>(i)], r);
      for (int32_t id = 0; id < vocabulary; ++id) {
        if (random() % 5 != 0) continue;
        edits.push_back(edit_of(id));
        apply(edits.back(), r);
      }
      rule.own_end = static_cast<int32_t>(edits.size());
      if (r % 2 == 1) {
        rule.mask = static_cast<int32_t>(static_cast<int64_t>(masks.size()) / words);
        for (int64_t w = 0; w < words; ++w) masks.push_back(static_cast<uint32_t>(random()));
        for (int64_t c = 0; c < vocabulary; ++c) {
          const uint32_t word = masks[static_cast<size_t>(rule.mask * words + c / 32)];
          if ((word >> (c % 32) & 1) == 0) expected.At(r, c) = -kInf;
        }
      }
      rules.push_back(rule);
    }
    for (int64_t parts : {1, 2, 3}) {
      const int64_t width = (columns + parts - 1) / parts;
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t first = part * width, own = std::min(width, columns - first);
        HostMatrix<float> mine(rows, own);
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < own; ++c) mine.At(r, c) = logits.At(r, first + c);
        }
        const HostMatrix<float> out = Process(mine, rules, edits, masks, vocabulary, first);
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < own; ++c) {
            const double want = expected.At(r, first + c);
            if (want == -kInf) {
              ASSERT_EQ(out.At(r, c), -kInf);
            } else {
              ASSERT_NEAR(out.At(r, c), want, 1e-5) << "row " << r << " token " << first + c;
            }
          }
        }
      }
    }
  }
}

TEST_F(LogitRulesTest, RefusesMasksThatAreTooShort) {
  const DeviceMatrix logits = DeviceMatrix::Input(RandomMatrix<float>(1, 100, 1), stream_);
  DeviceArray<RowRules> rows({RowRules{}}, stream_);
  DeviceArray<uint32_t> masks({1, 2, 3}, stream_);
  EXPECT_EQ(ProcessLogits({.rows = rows.data(), .edits = nullptr, .masks = masks.data(), .mask_words = 3}, 0,
                          100, logits.view(), stream_)
                .code(),
            absl::StatusCode::kInvalidArgument);
}

// Against the definition in double precision, over any number of parts.
TEST_F(LogitRulesTest, LogProbabilities) {
  const int64_t rows = 4, columns = 700, vocabulary = 650;
  for (float spread : {0.1f, 10.0f, 60.0f}) {
    HostMatrix<float> logits = RandomMatrix<float>(rows, columns, 11, -spread, spread);
    logits.At(2, 5) = -kInf;
    const std::vector<int32_t> tokens = {0, 649, 5, -1};
    for (int64_t parts : {1, 2, 5}) {
      const int64_t width = (columns + parts - 1) / parts;
      std::vector<LogSum> all;
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t first = part * width, own = std::min(width, columns - first);
        HostMatrix<float> mine(rows, own);
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < own; ++c) mine.At(r, c) = logits.At(r, first + c);
        }
        const DeviceMatrix device = DeviceMatrix::Input(mine, stream_, 2);
        DeviceArray<int32_t> device_tokens(tokens, stream_);
        DeviceArray<LogSum> sums(std::vector<LogSum>(rows), stream_);
        ASSERT_TRUE(
            SumRows(device.view(), first, vocabulary, device_tokens.data(), sums.data(), stream_).ok());
        for (const LogSum& sum : sums.ToHost()) all.push_back(sum);
      }
      for (int64_t r = 0; r < rows; ++r) {
        double total = 0;
        for (int64_t c = 0; c < vocabulary; ++c) total += std::exp(static_cast<double>(logits.At(r, c)));
        const RowLogProbs got = MergeLogSums(&all[static_cast<size_t>(r)], parts, rows);
        EXPECT_NEAR(got.total, std::log(total), 1e-5);
        const int32_t token = tokens[static_cast<size_t>(r)];
        if (token < 0 || r == 2) {
          EXPECT_THAT(got.token, Eq(-std::numeric_limits<double>::infinity()));
        } else {
          EXPECT_NEAR(got.token, logits.At(r, token) - std::log(total), 1e-5);
        }
      }
    }
  }
}

}  // namespace
}  // namespace dflash
