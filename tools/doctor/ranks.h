// The pair of the doctor as a group whose ranks are threads of this process.
#pragma once

#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/status.h"
#include "tools/doctor/doctor.h"
#include "tools/doctor/probe.h"
#include "worker/comm/host_communicator.h"
#include "worker/comm/rank_threads.h"
#include "worker/load_group.h"

namespace dflash::doctor {

inline constexpr int64_t kSequences = 6;
inline constexpr int64_t kCheckpoints = 4;  // of the prefix cache
inline constexpr int64_t kPrefillTokens = 512;

// The ranks of a group as threads of this process, all making the same calls.
class Ranks {
 public:
  static absl::StatusOr<std::unique_ptr<Ranks>> Load(const DoctorOptions& options) {
    std::unique_ptr<Ranks> ranks(new Ranks());
    DFLASH_ASSIGN_OR_RETURN(std::vector<std::unique_ptr<HostCommunicator>> communicators,
                            HostCommunicator::CreateGroup({.size = options.ranks}));
    std::move(communicators.begin(), communicators.end(), std::back_inserter(ranks->communicators_));
    ranks->groups_.resize(static_cast<size_t>(options.ranks));
    DFLASH_RETURN_IF_ERROR(ranks->Run([&](size_t rank) {
      GroupOptions group;
      group.model = options.model;
      group.draft_model = options.draft_model;
      group.threads = options.threads;
      group.device = options.device;
      group.max_sequences = kSequences;
      group.max_context_tokens = options.max_context_tokens;
      // Fewer pages than the slots can hold, so that some slots are left when others hold nearly all pages.
      group.cache_tokens = (kSequences - 2) * options.max_context_tokens;
      group.checkpoints = kCheckpoints;
      group.max_prefill_tokens = kPrefillTokens;
      group.adaptive_blocks = false;  // rounds in company are those alone
      group.allow_unlisted_keys = options.allow_unlisted_keys;
      group.defect = options.defect;
      group.communicator = ranks->communicators_[rank].get();
      DFLASH_ASSIGN_OR_RETURN(ranks->groups_[rank], LoadGroup(group, [&](const std::string& line) {
                                if (rank == 0 && options.log) options.log(line);
                              }));
      return absl::OkStatus();
    }));
    return ranks;
  }

  size_t size() const { return groups_.size(); }
  Group& leader() { return groups_[0]; }

  // The same work on every rank.
  absl::Status Run(const std::function<absl::Status(size_t rank)>& work) {
    return RunOnRanks(communicators_, work);
  }
  // The same measurement on every rank; rank 0's result.
  template <typename T>
  absl::StatusOr<T> Measure(const std::function<absl::StatusOr<T>(Probe& probe)>& work) {
    std::vector<T> results(groups_.size());
    DFLASH_RETURN_IF_ERROR(Run([&](size_t rank) {
      Probe probe(&groups_[rank]);
      DFLASH_ASSIGN_OR_RETURN(results[rank], work(probe));
      return absl::OkStatus();
    }));
    others_agree_ = true;
    if constexpr (std::is_same_v<T, Probe::EngineRuns>) {
      for (const T& other : results) others_agree_ &= Tokens(other.waves) == Tokens(results[0].waves);
    }
    return std::move(results[0]);
  }
  // Whether the last measurement's tokens were the same on all ranks.
  bool others_agree() const { return others_agree_; }

 private:
  Ranks() = default;
  static std::vector<std::vector<int32_t>> Tokens(const std::vector<std::vector<EngineRun>>& waves) {
    std::vector<std::vector<int32_t>> tokens;
    for (const auto& wave : waves) {
      for (const EngineRun& run : wave) {
        tokens.push_back(run.tokens);
        for (const RoundReport& round : run.rounds) tokens.back().push_back(-1 - round.accepted);
      }
    }
    return tokens;
  }

  std::vector<std::unique_ptr<Communicator>> communicators_;
  std::vector<Group> groups_;
  bool others_agree_ = true;
};

}  // namespace dflash::doctor
