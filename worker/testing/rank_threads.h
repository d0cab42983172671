// The ranks of a tensor-parallel group as threads of one process. Every rank holds its share of a model and
// makes the same calls; no plans are needed, since the same requests give the same decisions on every rank.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/comm/communicator.h"
#include "worker/testing/tiny_pair.h"

namespace dflash::testing {

class RankThreads {
 public:
  // Loads every rank's pair, all at once. `options.communicator` is set here; `wrap` may put another one
  // around a rank's; with `peer_memory` few rows are summed through it.
  using Wrap = std::function<std::unique_ptr<Communicator>(std::unique_ptr<Communicator>)>;
  static absl::StatusOr<std::unique_ptr<RankThreads>> Load(int size, const TinyPairOptions& options,
                                                           const Wrap& wrap = {}, bool peer_memory = false);

  // Calls `work` for every rank on a thread of its own and waits for all. A rank that fails ends the group.
  // The first error of any rank.
  absl::Status Run(const std::function<absl::Status(int rank, TinyPair& pair)>& work);

  // Runs the same requests to their ends on every rank; element r is rank r's outcomes.
  absl::StatusOr<std::vector<std::vector<GenerationOutcome>>> RunRequests(
      const std::vector<GenerationRequest>& requests, bool speculate = true);

  int size() const { return static_cast<int>(pairs_.size()); }
  TinyPair& pair(int rank) { return pairs_[static_cast<size_t>(rank)]; }

 private:
  RankThreads() = default;
  std::vector<std::unique_ptr<Communicator>> communicators_;
  std::vector<TinyPair> pairs_;
};

}  // namespace dflash::testing
