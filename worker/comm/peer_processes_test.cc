// Sums through peer memory between ranks as processes (the CPU backend's: CUDA cannot be forked).
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "worker/comm/testing/communicator_law.h"
#include "worker/comm/testing/peer_sum_law.h"
#include "worker/comm/testing/rank_process.h"

namespace dflash {
namespace {

class PeerProcesses : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, PeerProcesses, ::testing::Values(2, 4), ::testing::PrintToStringParamName());

TEST_P(PeerProcesses, GiveTheBitsOfTheCommunicatorUnderneath) {
  const HostCommunicator::Options options = {.size = GetParam(), .timeout = absl::Seconds(60)};
  const SharedSegment segment = HostCommunicator::CreateSegment(options).value();
  std::vector<std::unique_ptr<testing::RankProcess>> ranks;
  for (int rank = 0; rank < GetParam(); ++rank) {
    ranks.push_back(std::make_unique<testing::RankProcess>(
        segment, rank, options, [](std::unique_ptr<Communicator> base, const Stream& stream) {
          Communicator& underneath = *base;
          DFLASH_ASSIGN_OR_RETURN(const auto comm, testing::AddPeerMemory(std::move(base), stream));
          DFLASH_RETURN_IF_ERROR(testing::CheckPeerSums(*comm, underneath, stream));
          return testing::CheckCommunicator(*comm, stream);
        }));
  }
  for (auto& rank : ranks) EXPECT_EQ(rank->Wait(), 0);
}

}  // namespace
}  // namespace dflash
