// Communicators of the CPU backend: the laws of every collective, groups of threads and of processes, and
// what happens when a rank fails, dies, stops or does something else than its peers.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/host_communicator.h"
#include "worker/comm/solo_communicator.h"
#include "worker/comm/testing/communicator_law.h"
#include "worker/comm/testing/rank_process.h"

namespace dflash {
namespace {

using ::testing::HasSubstr;

Stream MakeStream() { return Stream::Create({.threads = 1}).value(); }

// Runs one thread a rank and returns their results.
std::vector<absl::Status> RunRanks(std::vector<std::unique_ptr<HostCommunicator>>& group,
                                   const std::function<absl::Status(Communicator&, const Stream&)>& work) {
  std::vector<absl::Status> results(group.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < group.size(); ++rank) {
    threads.emplace_back([&, rank] {
      const Stream stream = MakeStream();
      results[rank] = work(*group[rank], stream);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

std::vector<std::unique_ptr<HostCommunicator>> MakeGroup(int size,
                                                         absl::Duration timeout = absl::Seconds(60)) {
  auto group = HostCommunicator::CreateGroup({.size = size, .timeout = timeout});
  EXPECT_TRUE(group.ok()) << group.status();
  return *std::move(group);
}

absl::Status SumOnce(Communicator& comm, const Stream& stream) {
  float value = 1;
  return comm.AllReduce(&value, 1, DType::kF32, stream);
}

TEST(SoloCommunicator, Laws) {
  SoloCommunicator solo;
  const Stream stream = MakeStream();
  EXPECT_EQ(testing::CheckCommunicator(solo, stream), absl::OkStatus());
  EXPECT_EQ(solo.Broadcast(nullptr, 0, 1, stream).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(solo.AllReduce(nullptr, -1, DType::kF32, stream).code(), absl::StatusCode::kInvalidArgument);
  solo.Abort(absl::InternalError("first"));
  solo.Abort(absl::InternalError("second"));
  EXPECT_EQ(SumOnce(solo, stream), absl::UnavailableError("aborted: first"));
  EXPECT_FALSE(solo.Barrier(stream).ok());
  EXPECT_FALSE(solo.Check().ok());
}

class HostGroup : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, HostGroup, ::testing::Values(1, 2, 4, 8),
                         ::testing::PrintToStringParamName());

TEST_P(HostGroup, LawsWithThreads) {
  auto group = MakeGroup(GetParam());
  for (const absl::Status& result : RunRanks(group, testing::CheckCommunicator))
    EXPECT_EQ(result, absl::OkStatus());
}

// The order of ranks shows in the bits: 2^24 + 1 + 1 is 2^24 in this order, and 2^24 + 2 in another.
TEST_P(HostGroup, SumsInRankOrder) {
  auto group = MakeGroup(GetParam());
  std::vector<float> sums(group.size());
  RunRanks(group, [&](Communicator& comm, const Stream& stream) {
    float& value = sums[static_cast<size_t>(comm.rank())];
    value = comm.rank() == 0 ? 16777216.0f : 1.0f;
    return comm.AllReduce(&value, 1, DType::kF32, stream);
  });
  for (float sum : sums) EXPECT_EQ(sum, 16777216.0f);
  auto backwards = MakeGroup(GetParam());
  RunRanks(backwards, [&](Communicator& comm, const Stream& stream) {
    float& value = sums[static_cast<size_t>(comm.rank())];
    value = comm.rank() == comm.size() - 1 && comm.rank() > 0 ? 16777216.0f : 1.0f;
    return comm.AllReduce(&value, 1, DType::kF32, stream);
  });
  // Here the ones add up first, and their even part survives. (The sum of an odd number of them is a tie.)
  const int ones = GetParam() - 1;
  const float expected = GetParam() == 1 ? 1.0f : 16777216.0f + static_cast<float>(ones);
  for (float sum : sums) EXPECT_EQ(sum, expected);
}

TEST_P(HostGroup, EveryCallAfterAbortFailsAtOnce) {
  auto group = MakeGroup(GetParam(), absl::InfiniteDuration());
  group.back()->Abort(absl::InternalError("the first reason"));
  group.front()->Abort(absl::InternalError("the second reason"));
  const auto results = RunRanks(group, [](Communicator& comm, const Stream& stream) {
    std::vector<char> bytes(256);
    for (const absl::Status& status :
         {comm.AllReduce(bytes.data(), 4, DType::kF32, stream),
          comm.AllGather(bytes.data(), bytes.data(), 4, stream),
          comm.ReduceScatter(bytes.data(), bytes.data(), 1, DType::kBf16, stream),
          comm.Broadcast(bytes.data(), 4, 0, stream), comm.Barrier(stream), comm.Check()}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("the first reason"));
    }
    return absl::OkStatus();
  });
}

// Many times, since the ranks may be anywhere between their calls when the abort reaches them one by one.
TEST(HostCommunicator, AbortReleasesThoseWhoWait) {
  for (int round = 0; round < 200; ++round) {
    auto group = MakeGroup(4, absl::InfiniteDuration());
    const auto results = RunRanks(group, [](Communicator& comm, const Stream& stream) {
      if (comm.rank() != 2) return SumOnce(comm, stream);
      comm.Abort(absl::InternalError("rank 2 cannot go on"));
      return absl::OkStatus();
    });
    for (size_t rank : {0, 1, 3}) {
      ASSERT_EQ(results[rank].code(), absl::StatusCode::kUnavailable) << "round " << round;
      ASSERT_THAT(std::string(results[rank].message()), HasSubstr("rank 2 cannot go on"));
    }
  }
}

TEST(HostCommunicator, ARankThatDoesNotComeRunsIntoTheDeadline) {
  auto group = MakeGroup(3, absl::Milliseconds(100));
  const auto results = RunRanks(group, [](Communicator& comm, const Stream& stream) {
    return comm.rank() == 1 ? absl::OkStatus() : SumOnce(comm, stream);
  });
  int deadlines = 0;
  for (size_t rank : {0, 2}) {
    EXPECT_FALSE(results[rank].ok());
    EXPECT_THAT(std::string(results[rank].message()), HasSubstr("rank 1 did not come within 100ms"));
    deadlines += absl::IsDeadlineExceeded(results[rank]);
  }
  EXPECT_GE(deadlines, 1);
  EXPECT_THAT(std::string(group[1]->Check().message()), HasSubstr("did not come"));
}

TEST(HostCommunicator, DifferentCallsAreOurBug) {
  for (const int variant : {0, 1, 2, 3}) {
    auto group = MakeGroup(2);
    const auto results = RunRanks(group, [&](Communicator& comm, const Stream& stream) {
      std::vector<char> bytes(64);
      if (comm.rank() == 0) return comm.AllReduce(bytes.data(), 4, DType::kF32, stream);
      switch (variant) {
        case 0:
          return comm.AllReduce(bytes.data(), 5, DType::kF32, stream);
        case 1:
          return comm.AllReduce(bytes.data(), 4, DType::kBf16, stream);
        case 2:
          return comm.Broadcast(bytes.data(), 4, 0, stream);
        default:
          return comm.Barrier(stream);
      }
    });
    EXPECT_FALSE(results[0].ok());
    EXPECT_FALSE(results[1].ok());
    EXPECT_TRUE(absl::IsInternal(results[0]) || absl::IsInternal(results[1])) << results[0] << results[1];
    EXPECT_THAT(std::string(group[0]->Check().message()), HasSubstr("AllReduce of 4"));
  }
}

TEST(HostCommunicator, ALeavingRankTakesTheGroupWithIt) {
  auto group = MakeGroup(2);
  const auto results = RunRanks(group, SumOnce);
  EXPECT_EQ(results[0], absl::OkStatus());
  EXPECT_EQ(results[1], absl::OkStatus());
  group[1].reset();
  const Stream stream = MakeStream();
  EXPECT_THAT(std::string(SumOnce(*group[0], stream).message()), HasSubstr("was destroyed"));
}

TEST(HostCommunicator, BadArguments) {
  EXPECT_EQ(HostCommunicator::CreateGroup({.size = 0}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(HostCommunicator::CreateGroup({.size = 65}).status().code(), absl::StatusCode::kInvalidArgument);
  auto segment = std::make_shared<SharedSegment>(HostCommunicator::CreateSegment({.size = 2}).value());
  EXPECT_EQ(HostCommunicator::Join(segment, 2, {.size = 2}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(HostCommunicator::Join(segment, 0, {.size = 3}).status().code(),
            absl::StatusCode::kInvalidArgument);
  const auto first = HostCommunicator::Join(segment, 0, {.size = 2}).value();
  EXPECT_EQ(HostCommunicator::Join(segment, 0, {.size = 2}).status().code(),
            absl::StatusCode::kAlreadyExists);
  const Stream stream = MakeStream();
  EXPECT_EQ(first->Broadcast(nullptr, 0, 2, stream).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(first->AllGather(nullptr, nullptr, -4, stream).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(first->Check(), absl::OkStatus()) << "a bad argument harms nobody else";
  EXPECT_EQ(SharedSegment::Open(getpid(), segment->fd(), 4096).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(SharedSegment::Open(getpid(), 1 << 20, segment->bytes()).status().code(),
            absl::StatusCode::kUnavailable);
}

// --- processes ---------------------------------------------------------------------------------------------

// The work of a process on its communicator.
using Work = std::function<absl::Status(Communicator&, const Stream&)>;
std::unique_ptr<testing::RankProcess> StartRank(const SharedSegment& segment, int rank,
                                                const HostCommunicator::Options& options, const Work& work) {
  return std::make_unique<testing::RankProcess>(
      segment, rank, options,
      [&](std::unique_ptr<Communicator> comm, const Stream& stream) { return work(*comm, stream); });
}

TEST_P(HostGroup, LawsWithProcesses) {
  const HostCommunicator::Options options = {.size = GetParam(), .timeout = absl::Seconds(60)};
  const SharedSegment segment = HostCommunicator::CreateSegment(options).value();
  std::vector<std::unique_ptr<testing::RankProcess>> ranks;
  for (int rank = 0; rank < GetParam(); ++rank) {
    ranks.push_back(StartRank(segment, rank, options, testing::CheckCommunicator));
  }
  for (auto& rank : ranks) EXPECT_EQ(rank->Wait(), 0);
}

// Sums until something fails; OK when that was Unavailable naming `expected`.
absl::Status SumUntil(Communicator& comm, const Stream& stream, absl::StatusCode code, const char* expected) {
  absl::Status status;
  while (status.ok()) status = SumOnce(comm, stream);
  if ((status.code() == code || absl::IsUnavailable(status)) &&
      status.message().find(expected) != std::string::npos)
    return absl::OkStatus();
  return status;
}

TEST(HostCommunicator, AKilledProcessIsNoticed) {
  const HostCommunicator::Options options = {.size = 4, .timeout = absl::InfiniteDuration()};
  auto segment = std::make_shared<SharedSegment>(HostCommunicator::CreateSegment(options).value());
  std::vector<std::unique_ptr<testing::RankProcess>> ranks;
  for (int rank = 1; rank < 4; ++rank) {
    ranks.push_back(StartRank(*segment, rank, options, [](Communicator& comm, const Stream& stream) {
      return SumUntil(comm, stream, absl::StatusCode::kUnavailable, "rank 2 (process");
    }));
  }
  const auto comm = HostCommunicator::Join(segment, 0, options).value();
  const Stream stream = MakeStream();
  for (int i = 0; i < 100; ++i) ASSERT_EQ(SumOnce(*comm, stream), absl::OkStatus());  // they are at work
  ranks[1]->Signal(SIGKILL);
  EXPECT_EQ(SumUntil(*comm, stream, absl::StatusCode::kUnavailable, "rank 2 (process"), absl::OkStatus());
  EXPECT_EQ(ranks[0]->Wait(), 0);
  EXPECT_EQ(ranks[1]->Wait(), 128 + SIGKILL);
  EXPECT_EQ(ranks[2]->Wait(), 0);
}

TEST(HostCommunicator, AStoppedProcessRunsIntoTheDeadline) {
  const HostCommunicator::Options options = {.size = 3, .timeout = absl::Seconds(1)};
  auto segment = std::make_shared<SharedSegment>(HostCommunicator::CreateSegment(options).value());
  std::vector<std::unique_ptr<testing::RankProcess>> ranks;
  for (int rank = 1; rank < 3; ++rank) {
    ranks.push_back(StartRank(*segment, rank, options, [](Communicator& comm, const Stream& stream) {
      return SumUntil(comm, stream, absl::StatusCode::kDeadlineExceeded, "rank 1 did not come within 1s");
    }));
  }
  const auto comm = HostCommunicator::Join(segment, 0, {.size = 3, .timeout = absl::Seconds(60)}).value();
  const Stream stream = MakeStream();
  for (int i = 0; i < 100; ++i) ASSERT_EQ(SumOnce(*comm, stream), absl::OkStatus());
  ranks[0]->Signal(SIGSTOP);
  EXPECT_EQ(SumUntil(*comm, stream, absl::StatusCode::kDeadlineExceeded, "rank 1 did not come"),
            absl::OkStatus());
  EXPECT_EQ(ranks[1]->Wait(), 0);
  ranks[0]->Signal(SIGCONT);  // what it hears now is that the group is dead
  EXPECT_EQ(ranks[0]->Wait(), 0);
}

}  // namespace
}  // namespace dflash
