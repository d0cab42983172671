// Communicators with device buffers on one GPU: ranks that share it through the host, and NCCL with one rank,
// whose every path but the network is the real one.
#include <memory>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/device/graph.h"
#include "worker/comm/host_communicator.h"
#include "worker/comm/nccl_communicator.h"
#include "worker/comm/testing/communicator_law.h"

namespace dflash {
namespace {

using ::testing::HasSubstr;

TEST(HostCommunicatorOnTheGpu, Laws) {
  for (const int size : {2, 4}) {
    auto group = HostCommunicator::CreateGroup({.size = size}).value();
    std::vector<absl::Status> results(group.size());
    std::vector<std::thread> ranks;
    for (size_t rank = 0; rank < group.size(); ++rank) {
      ranks.emplace_back([&, rank] {
        const Stream stream = Stream::Create({}).value();
        results[rank] = testing::CheckCommunicator(*group[rank], stream);
      });
    }
    for (std::thread& rank : ranks) rank.join();
    for (const absl::Status& result : results) EXPECT_EQ(result, absl::OkStatus());
  }
}

class OneRankOfNccl : public ::testing::Test {
 protected:
  void SetUp() override {
    const absl::StatusOr<std::string> id = NcclUniqueId();
    if (absl::IsUnavailable(id.status())) GTEST_SKIP() << id.status();
    ASSERT_TRUE(id.ok()) << id.status();
    stream_ = std::make_unique<Stream>(Stream::Create({}).value());
    auto communicator = MakeNcclCommunicator(
        {.rank = 0, .size = 1, .unique_id = *id, .timeout = absl::Seconds(30)}, *stream_);
    ASSERT_TRUE(communicator.ok()) << communicator.status();
    communicator_ = *std::move(communicator);
  }
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Communicator> communicator_;
};

TEST_F(OneRankOfNccl, Laws) {
  EXPECT_EQ(testing::CheckCommunicator(*communicator_, *stream_), absl::OkStatus());
  EXPECT_EQ(communicator_->Check(), absl::OkStatus());
  EXPECT_TRUE(communicator_->sums_in_rank_order());
}

TEST_F(OneRankOfNccl, EveryCallAfterAbortFailsAtOnce) {
  ASSERT_EQ(communicator_->Barrier(*stream_), absl::OkStatus());
  Buffer buffer = Buffer::Allocate(1 << 20, *stream_).value();
  for (int i = 0; i < 100; ++i)
    ASSERT_EQ(communicator_->AllReduce(buffer.data(), 1 << 18, DType::kF32, *stream_), absl::OkStatus());
  // From another thread, with work under way.
  std::thread([&] { communicator_->Abort(absl::InternalError("the first reason")); }).join();
  communicator_->Abort(absl::InternalError("the second reason"));
  EXPECT_EQ(stream_->Synchronize(), absl::OkStatus());
  for (const absl::Status& status :
       {communicator_->AllReduce(buffer.data(), 4, DType::kF32, *stream_),
        communicator_->AllGather(buffer.data(), buffer.data(), 4, *stream_),
        communicator_->ReduceScatter(buffer.data(), buffer.data(), 1, DType::kBf16, *stream_),
        communicator_->Broadcast(buffer.data(), 4, 0, *stream_), communicator_->Barrier(*stream_),
        communicator_->Check()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("the first reason"));
  }
  communicator_.reset();
}

TEST_F(OneRankOfNccl, ManyLives) {
  for (int life = 0; life < 3; ++life) {
    const std::string id = NcclUniqueId().value();
    auto next =
        MakeNcclCommunicator({.rank = 0, .size = 1, .unique_id = id, .timeout = absl::Seconds(30)}, *stream_);
    ASSERT_TRUE(next.ok()) << next.status();
    EXPECT_EQ((*next)->Barrier(*stream_), absl::OkStatus());
    if (life == 1) (*next)->Abort(absl::InternalError("in between"));
  }
}

TEST_F(OneRankOfNccl, CallsMayBeCaptured) {
  ASSERT_TRUE(communicator_->capturable());
  ASSERT_EQ(communicator_->Barrier(*stream_), absl::OkStatus());  // connections are made outside of a capture
  const std::vector<float> values = testing::RankValues<float>(0, 5000, 3);
  auto data = testing::DeviceValues<float>::Create(values, *stream_).value();
  auto graph = Graph::Capture(
      *stream_, [&] { return communicator_->AllReduce(data.data(), 5000, DType::kF32, *stream_); });
  ASSERT_TRUE(graph.ok()) << graph.status();
  for (int replay = 0; replay < 2; ++replay) ASSERT_EQ(graph->Launch(*stream_), absl::OkStatus());
  EXPECT_EQ(data.Expect(values, "a captured sum", *stream_), absl::OkStatus());
  EXPECT_EQ(communicator_->Check(), absl::OkStatus());
}

// A peer that never comes: the initialization ends by its deadline instead of waiting for ever.
TEST_F(OneRankOfNccl, AMissingPeerRunsIntoTheDeadline) {
  const std::string id = NcclUniqueId().value();
  const auto missing =
      MakeNcclCommunicator({.rank = 0, .size = 2, .unique_id = id, .timeout = absl::Seconds(2)}, *stream_);
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kDeadlineExceeded) << missing.status();
}

TEST_F(OneRankOfNccl, BadArguments) {
  EXPECT_EQ(communicator_->AllReduce(nullptr, -1, DType::kF32, *stream_).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(communicator_->Broadcast(nullptr, 4, 1, *stream_).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(communicator_->Check(), absl::OkStatus());
  EXPECT_FALSE(MakeNcclCommunicator({.rank = 0, .size = 1, .unique_id = "short"}, *stream_).ok());
}

}  // namespace
}  // namespace dflash
