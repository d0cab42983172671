// Every rank gets the tokens that one rank with all logits samples.
#include "worker/model/sharded_sampler.h"

#include <cmath>
#include <memory>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/device/buffer.h"
#include "kernels/sampling/draft_choice_ref.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"
#include "worker/comm/host_communicator.h"

namespace dflash {
namespace {

using ::testing::FloatNear;
using ::testing::Pointwise;

constexpr int64_t kHeadRows = 528, kVocabulary = 515;  // 13 rows of padding

struct Rows {
  HostMatrix<float> logits{0, 0};
  std::vector<SamplingParams> params;
  std::vector<int64_t> positions;
};

Rows MakeRows(SamplingReach reach) {
  Rows rows;
  for (uint64_t i = 0; i < 24; ++i) {
    SamplingParams params = {.temperature = i % 4 == 0 ? 0.0f : 0.5f + 0.1f * static_cast<float>(i),
                             .top_k = static_cast<int32_t>(i % 5 == 0 ? kMaxListed : 1 + i),
                             .top_p = i % 3 == 0 ? 1.0f : 0.8f,
                             .min_p = i % 2 == 0 ? 0.0f : 0.05f,
                             .seed = i};
    if (reach == SamplingReach::kBest) params.temperature = 0;
    if (reach == SamplingReach::kAll) params.top_k = i % 2 == 0 ? 0 : params.top_k * 40;
    rows.params.push_back(params);
    rows.positions.push_back(static_cast<int64_t>(i * i));
  }
  rows.logits = RandomMatrix<float>(static_cast<int64_t>(rows.params.size()), kHeadRows, 9, -4, 4);
  for (float& logit : rows.logits.values) logit = std::nearbyint(logit * 4) / 4;  // ties across ranks
  for (int64_t r = 0; r < rows.logits.rows; ++r) {
    for (int64_t v = kVocabulary; v < kHeadRows; ++v) rows.logits.At(r, v) = 50;  // must never win
  }
  rows.logits.At(3, 400) = std::nanf("");
  return rows;
}

struct Tokens {
  std::vector<int32_t> sampled, drafts;
  std::vector<float> confidences;
};

// first_id: of the rank; -1: the right one.
Tokens Work(Communicator* communicator, const Rows& rows, SamplingReach reach, int64_t first_id = -1) {
  const Stream stream = Stream::Create({.threads = 1}).value();
  const int64_t width = kHeadRows / communicator->size();
  HostMatrix<float> own(rows.logits.rows, width);
  for (int64_t r = 0; r < own.rows; ++r) {
    for (int64_t c = 0; c < width; ++c) own.At(r, c) = rows.logits.At(r, communicator->rank() * width + c);
  }
  const DeviceMatrix logits = DeviceMatrix::Input(own, stream);
  DeviceArray<SamplingParams> params(rows.params, stream);
  DeviceArray<int64_t> positions(rows.positions, stream);
  DeviceArray<int32_t> sampled(std::vector<int32_t>(rows.params.size(), -99), stream);
  DeviceArray<int32_t> drafts(std::vector<int32_t>(rows.params.size(), -99), stream);
  DeviceArray<float> confidences(std::vector<float>(rows.params.size(), -99), stream);
  if (first_id < 0) first_id = communicator->rank() * width;
  ShardedSampler sampler = ShardedSampler::Create(communicator, first_id, own.rows, stream).value();
  absl::Status status =
      sampler.Sample(logits.view(), params.data(), positions.data(), kVocabulary, reach, sampled.data());
  EXPECT_TRUE(status.ok()) << status;
  status = sampler.ChooseDrafts(logits.view(), kVocabulary, drafts.data(), confidences.data());
  EXPECT_TRUE(status.ok()) << status;
  return {.sampled = sampled.ToHost(), .drafts = drafts.ToHost(), .confidences = confidences.ToHost()};
}

TEST(ShardedSamplerTest, EveryRankGetsTheTokensOfWholeRows) {
  for (SamplingReach reach : {SamplingReach::kBest, SamplingReach::kList, SamplingReach::kAll}) {
    const Rows rows = MakeRows(reach);
    const Stream stream = Stream::Create({.threads = 1}).value();
    const DeviceMatrix logits = DeviceMatrix::Input(rows.logits, stream);
    DeviceArray<SamplingParams> params(rows.params, stream);
    DeviceArray<int64_t> positions(rows.positions, stream);
    DeviceArray<int32_t> tokens(std::vector<int32_t>(rows.params.size()), stream);
    ASSERT_TRUE(
        SampleRows(logits.view(), params.data(), positions.data(), kVocabulary, tokens.data(), stream).ok());
    const std::vector<int32_t> sampled = tokens.ToHost();
    std::vector<int32_t> drafts;
    std::vector<float> confidences;
    for (int64_t r = 0; r < rows.logits.rows; ++r) {
      const DraftChoiceRef choice = ChooseDraftRef(rows.logits.Row(r), kVocabulary);
      drafts.push_back(choice.token);
      confidences.push_back(static_cast<float>(choice.confidence));
    }
    EXPECT_EQ(sampled[3], -1);
    EXPECT_EQ(sampled == drafts, reach == SamplingReach::kBest);
    for (int ranks : {1, 2, 4, 8}) {
      auto communicators = HostCommunicator::CreateGroup({.size = ranks}).value();
      std::vector<Tokens> results(static_cast<size_t>(ranks));
      std::vector<std::thread> threads;
      for (size_t rank = 0; rank < results.size(); ++rank)
        threads.emplace_back([&, rank] { results[rank] = Work(communicators[rank].get(), rows, reach); });
      for (std::thread& thread : threads) thread.join();
      for (const Tokens& result : results) {
        EXPECT_EQ(result.sampled, sampled) << ranks << " ranks";
        EXPECT_EQ(result.drafts, drafts) << ranks << " ranks";
        EXPECT_THAT(result.confidences, Pointwise(FloatNear(1e-5f), confidences)) << ranks << " ranks";
        EXPECT_EQ(result.confidences, results[0].confidences) << ranks << " ranks";
      }
    }
  }
}

// A rank that counts its tokens from 0 gives others: the comparison above can fail.
TEST(ShardedSamplerTest, AMissingFirstTokenIsSeen) {
  const Rows rows = MakeRows(SamplingReach::kList);
  const auto run = [&](int64_t first_id_of_last) {
    auto communicators = HostCommunicator::CreateGroup({.size = 2}).value();
    Tokens first;
    std::thread other([&] { Work(communicators[1].get(), rows, SamplingReach::kList, first_id_of_last); });
    first = Work(communicators[0].get(), rows, SamplingReach::kList);
    other.join();
    return first.sampled;
  };
  EXPECT_NE(run(0), run(-1));
}

TEST(ShardedSamplerTest, RefusesMoreRowsThanItHasRoomFor) {
  const Stream stream = Stream::Create({.threads = 1}).value();
  auto communicators = HostCommunicator::CreateGroup({.size = 2}).value();
  ShardedSampler sampler = ShardedSampler::Create(communicators[0].get(), 0, 3, stream).value();
  const DeviceMatrix logits = DeviceMatrix::Input(HostMatrix<float>(4, 8), stream);
  DeviceArray<int32_t> tokens(std::vector<int32_t>(4), stream);
  EXPECT_EQ(sampler.ChooseDrafts(logits.view(), 8, tokens.data(), nullptr).code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dflash
