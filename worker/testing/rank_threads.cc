#include "worker/testing/rank_threads.h"

#include <utility>

#include "base/status.h"
#include "worker/comm/host_communicator.h"
#include "worker/comm/peer_communicator.h"
#include "worker/comm/peer_memory.h"
#include "worker/comm/rank_threads.h"

namespace dflash::testing {
namespace {

constexpr int64_t kPeerBytes = int64_t{16} << 20;

}  // namespace

absl::StatusOr<std::unique_ptr<RankThreads>> RankThreads::Load(int size, const TinyPairOptions& options,
                                                               const Wrap& wrap, bool peer_memory) {
  std::unique_ptr<RankThreads> group(new RankThreads());
  DFLASH_ASSIGN_OR_RETURN(std::vector<std::unique_ptr<HostCommunicator>> communicators,
                          HostCommunicator::CreateGroup({.size = size}));
  for (std::unique_ptr<HostCommunicator>& communicator : communicators) {
    group->communicators_.push_back(wrap ? wrap(std::move(communicator)) : std::move(communicator));
  }
  group->pairs_.resize(static_cast<size_t>(size));
  DFLASH_RETURN_IF_ERROR(group->Run([&](int rank, TinyPair& pair) {
    TinyPairOptions own = options;
    std::unique_ptr<Communicator>& communicator = group->communicators_[static_cast<size_t>(rank)];
    if (peer_memory) {
      DFLASH_ASSIGN_OR_RETURN(const Stream stream, Stream::Create({.threads = 1}));
      DFLASH_ASSIGN_OR_RETURN(PeerMemory memory, PeerMemory::Create(communicator.get(), kPeerBytes, stream));
      DFLASH_ASSIGN_OR_RETURN(
          communicator, PeerCommunicator::Create(std::move(communicator), std::move(memory), /*device=*/0));
    }
    own.communicator = communicator.get();
    DFLASH_ASSIGN_OR_RETURN(pair, LoadTinyPair(own));
    return absl::OkStatus();
  }));
  return group;
}

absl::Status RankThreads::Run(const std::function<absl::Status(int rank, TinyPair& pair)>& work) {
  return RunOnRanks(communicators_, [&](size_t rank) { return work(static_cast<int>(rank), pairs_[rank]); });
}

absl::StatusOr<std::vector<std::vector<GenerationOutcome>>> RankThreads::RunRequests(
    const std::vector<GenerationRequest>& requests, bool speculate) {
  std::vector<std::vector<GenerationOutcome>> outcomes(pairs_.size());
  DFLASH_RETURN_IF_ERROR(Run([&](int rank, TinyPair& pair) -> absl::Status {
    DFLASH_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine,
                            MakeEngine(pair, speculate ? pair.rank_drafter() : nullptr));
    DFLASH_ASSIGN_OR_RETURN(outcomes[static_cast<size_t>(rank)], RunAll(*engine, requests));
    return absl::OkStatus();
  }));
  return outcomes;
}

}  // namespace dflash::testing
