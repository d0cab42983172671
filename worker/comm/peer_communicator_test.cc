// Sums through peer memory between ranks as threads of one process: the bits of the communicator underneath,
// and an end when a rank fails.
#include "worker/comm/peer_communicator.h"

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/testing/device_matrix.h"
#include "kernels/testing/host_matrix.h"
#include "worker/comm/forwarding_communicator.h"
#include "worker/comm/host_communicator.h"
#include "worker/comm/testing/communicator_law.h"
#include "worker/comm/testing/peer_sum_law.h"

namespace dflash {
namespace {

using testing::AddPeerMemory;
using ::testing::HasSubstr;
using testing::kAreaBytes;
using testing::kCols;
using testing::kEps;

constexpr absl::Duration kPatience = absl::Seconds(60);

Stream MakeStream() { return Stream::Create({.threads = 1}).value(); }

// A kernel that waits for a rank that still loads the kernel would wait for ever where they share a device.
void LoadKernel(const Stream& stream) {
  const DeviceMatrix x = DeviceMatrix::Activations(RandomMatrix<float>(1, kCols, 1), stream);
  const DeviceMatrix y = DeviceMatrix::Output(1, kCols, ActivationDType(), stream);
  const DeviceMatrix w = DeviceMatrix::Input(RandomMatrix<float>(1, kCols, 2), stream);
  DeviceArray<int32_t> late({0}, stream);
  const Buffer area = Buffer::Allocate(kAreaBytes, stream).value();
  PeerAreas alone;
  alone.area[0] = area.data();
  alone.max_rows = 1;
  alone.cols = kCols;
  const PeerPatience patience = {.timeout = absl::Seconds(1), .late = late.data()};
  EXPECT_TRUE(PreparePeerArea(area.data(), kAreaBytes, 1, stream).ok());
  EXPECT_TRUE(PeerSumAddRmsNorm(alone, x.view(), y.view(), w.view(), NormWeight::kOnePlus, kEps, x.view(),
                                patience, stream)
                  .ok());
  EXPECT_TRUE(PeerSum(alone, x.view(), patience, stream).ok());
  EXPECT_TRUE(PeerBroadcast(alone, y.view().data, 4, 0, patience, stream).ok());
  EXPECT_TRUE(stream.Synchronize().ok());
}

// Waits `timeout` where the peer communicator asks how long, and kPatience underneath.
class TimedCommunicator final : public ForwardingCommunicator {
 public:
  TimedCommunicator(std::unique_ptr<Communicator> base, absl::Duration timeout)
      : ForwardingCommunicator(base.get()), base_(std::move(base)), timeout_(timeout) {}
  absl::Duration timeout() const override { return timeout_; }

 private:
  const std::unique_ptr<Communicator> base_;
  const absl::Duration timeout_;
};

// One thread a rank, each with a peer communicator of its own that waits `timeout`.
std::vector<absl::Status> RunRanks(
    int size, absl::Duration timeout,
    const std::function<absl::Status(PeerCommunicator&, Communicator& underneath, const Stream&)>& work) {
  auto group = HostCommunicator::CreateGroup({.size = size, .timeout = kPatience}).value();
  std::vector<absl::Status> results(group.size());
  std::vector<std::unique_ptr<PeerCommunicator>> ranks(group.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < group.size(); ++rank) {
    threads.emplace_back([&, rank] {
      const Stream stream = MakeStream();
      LoadKernel(stream);
      Communicator& underneath = *group[rank];
      absl::StatusOr<std::unique_ptr<PeerCommunicator>> comm =
          AddPeerMemory(std::make_unique<TimedCommunicator>(std::move(group[rank]), timeout), stream);
      results[rank] = comm.ok() ? work(**comm, underneath, stream) : comm.status();
      // Until all are through: others write to its area when they stop.
      if (comm.ok()) ranks[rank] = *std::move(comm);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

class PeerGroup : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, PeerGroup, ::testing::Values(2, 4), ::testing::PrintToStringParamName());

TEST_P(PeerGroup, GivesTheBitsOfTheCommunicatorUnderneath) {
  for (const absl::Status& result : RunRanks(
           GetParam(), kPatience, [](PeerCommunicator&comm, Communicator&underneath, const Stream&stream) {
             EXPECT_STREQ(comm.name(), "host+peer");
             EXPECT_TRUE(comm.sums_in_rank_order());
             DFLASH_RETURN_IF_ERROR(testing::CheckPeerSums(comm, underneath, stream));
             // It allocates between calls, which waits for kernels that wait where ranks share a GPU.
             if (std::string(BackendName()) == "cuda") return absl::OkStatus();
             DFLASH_RETURN_IF_ERROR(testing::CheckCommunicator(comm, stream));
             EXPECT_GT(comm.peer_messages(), 10);
             return absl::OkStatus();
           })) {
    EXPECT_EQ(result, absl::OkStatus());
  }
}

// One call of three rows.
absl::Status SumOnce(PeerCommunicator& comm, const Stream& stream) {
  const DeviceMatrix product = DeviceMatrix::Activations(RandomMatrix<float>(3, kCols, 1), stream);
  const DeviceMatrix residual = DeviceMatrix::Activations(RandomMatrix<float>(3, kCols, 2), stream);
  const DeviceMatrix y = DeviceMatrix::Output(3, kCols, ActivationDType(), stream);
  const DeviceMatrix w = DeviceMatrix::Input(RandomMatrix<float>(1, kCols, 3), stream);
  DFLASH_RETURN_IF_ERROR(comm.AllReduceAddRmsNorm(product.view(), residual.view(), w.view(),
                                                  NormWeight::kOnePlus, kEps, y.view(), stream));
  DFLASH_RETURN_IF_ERROR(stream.Synchronize());
  return comm.Check();
}

// Rank 0, for which the others wait first: whoever is slow besides is not named.
TEST_P(PeerGroup, ARankThatDoesNotComeIsNamed) {
  absl::Notification done;
  const std::vector<absl::Status> results = RunRanks(
      GetParam(), absl::Seconds(1), [&](PeerCommunicator& comm, Communicator&, const Stream& stream) {
        if (comm.rank() == 0) {
          done.WaitForNotificationWithTimeout(kPatience);
          return SumOnce(comm, stream);  // too late: the group is dead
        }
        const absl::Status status = SumOnce(comm, stream);
        EXPECT_EQ(SumOnce(comm, stream).code(), absl::StatusCode::kUnavailable);
        if (comm.rank() == 1) done.Notify();
        return status;
      });
  for (const absl::Status& result : results) {
    EXPECT_EQ(result.code(), absl::StatusCode::kUnavailable) << result;
    EXPECT_THAT(std::string(result.message()), HasSubstr("rank 0 did not come within 1s"));
  }
}

TEST_P(PeerGroup, AnAbortReleasesThoseWhoWait) {
  const absl::Time begin = absl::Now();
  const std::vector<absl::Status> results =
      RunRanks(GetParam(), kPatience, [](PeerCommunicator& comm, Communicator&, const Stream& stream) {
        if (comm.rank() != 0) return SumOnce(comm, stream);
        comm.Abort(absl::InternalError("no more of this"));
        return SumOnce(comm, stream);
      });
  EXPECT_LT(absl::Now() - begin, kPatience);
  for (const absl::Status& result : results) {
    EXPECT_EQ(result.code(), absl::StatusCode::kUnavailable) << result;
    EXPECT_THAT(std::string(result.message()), HasSubstr("no more of this"));
  }
}

// A rank with no room for its area: nobody uses any, and everybody knows why.
TEST(PeerMemoryTest, AllRanksOrNone) {
  auto group = HostCommunicator::CreateGroup({.size = 3, .timeout = kPatience}).value();
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < group.size(); ++rank) {
    threads.emplace_back([&, rank] {
      const Stream stream = MakeStream();
      const auto memory = PeerMemory::Create(group[rank].get(), rank == 1 ? int64_t{-1} : kAreaBytes, stream);
      ASSERT_TRUE(memory.ok()) << memory.status();
      EXPECT_THAT(memory->problem(), HasSubstr("rank 1: "));
      EXPECT_EQ(group[rank]->Barrier(stream), absl::OkStatus());  // the group lives
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace dflash
