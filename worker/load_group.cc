#include "worker/load_group.h"

#include <algorithm>
#include <future>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "kernels/device/buffer.h"
#include "kernels/device/graph.h"
#include "kernels/device/memory.h"
#include "text/tokenizer_file.h"
#include "worker/defects/defects.h"
#include "worker/draft/draft_follower.h"
#include "worker/memory_plan.h"
#include "worker/model/checkpoint.h"
#include "worker/model/draft_config.h"
#include "worker/model/target_config.h"

namespace dflash {
namespace {

using Log = std::function<void(const std::string&)>;

// Turns bytes loaded into a line at every tenth of this rank's share, and one with the rate at the end.
class ProgressLog {
 public:
  ProgressLog(std::string what, int64_t total_bytes, const Log& log)
      : what_(std::move(what)), total_(std::max<int64_t>(total_bytes, 1)), log_(log), start_(absl::Now()) {}
  void Add(int64_t bytes) {
    done_ += bytes;
    const int64_t tenth = 10 * done_ / total_;
    if (tenth == last_tenth_) return;
    last_tenth_ = tenth;
    log_(absl::StrFormat("loading %s: %d%% of %.1f MiB", what_, 10 * tenth,
                         static_cast<double>(total_) / (1 << 20)));
  }
  void Finish() {
    const double seconds = absl::ToDoubleSeconds(absl::Now() - start_);
    log_(absl::StrFormat("loaded %s: %.1f MiB in %.2f s, %.2f GB/s", what_,
                         static_cast<double>(done_) / (1 << 20), seconds,
                         static_cast<double>(done_) / 1e9 / std::max(seconds, 1e-9)));
  }

 private:
  std::string what_;
  int64_t total_;
  const Log& log_;
  absl::Time start_;
  int64_t done_ = 0;
  int64_t last_tenth_ = 0;
};

void LogWarnings(const std::vector<std::string>& warnings, const Log& log) {
  for (const std::string& warning : warnings) log("warning: " + warning);
}

void AddFingerprints(const std::string& whose, const Checkpoint& checkpoint, Group& group) {
  for (const auto& [name, fingerprint] : checkpoint.fingerprints())
    group.fingerprints[absl::StrCat(whose, " ", name)] = fingerprint;
}

GroupRank RankOf(const GroupOptions& options) {
  if (options.communicator == nullptr) return {};
  return {.rank = options.communicator->rank(), .size = options.communicator->size()};
}

// What `rank` is going to allocate.
absl::StatusOr<MemoryDemand> DemandOf(const GroupOptions& options, const TargetConfig& target_config,
                                      const TargetCheckpoint& target,
                                      const std::optional<DraftConfig>& draft_config,
                                      const std::optional<DraftCheckpoint>& draft, const Group& group,
                                      GroupRank rank, int64_t pages) {
  MemoryDemand demand;
  DFLASH_ASSIGN_OR_RETURN(demand.target, RankConfig(target_config, rank));
  demand.target_weight_bytes =
      WeightBytes(target, SliceTensors(target_config, rank), target_config.tie_word_embeddings);
  demand.sequences = options.max_sequences;
  demand.pages = pages;
  demand.prefill_rows = PrefillRows(options.max_prefill_tokens);
  demand.checkpoints = options.checkpoints;
  demand.activation = ActivationDType();
  if (!draft_config) return demand;
  demand.taps = draft_config->num_taps();
  demand.block_rows = group.contract.block_size;
  const bool sharded = options.draft_placement != DraftPlacement::kRankZero;
  if (rank.rank > 0 && !sharded) return demand;
  const GroupRank draft_rank = sharded ? rank : GroupRank{};
  DFLASH_ASSIGN_OR_RETURN(demand.drafter, RankConfig(*draft_config, draft_rank));
  demand.drafter_weight_bytes = WeightBytes(*draft, SliceTensors(*draft_config, draft_rank), false);
  return demand;
}

// The least of all ranks' values, on every rank.
absl::StatusOr<int64_t> LeastOfRanks(int64_t value, Communicator* communicator, const Stream& stream) {
  if (communicator == nullptr || communicator->size() == 1) return value;
  constexpr auto kBytes = static_cast<int64_t>(sizeof(value));
  std::vector<int64_t> values(static_cast<size_t>(communicator->size()));
  DFLASH_ASSIGN_OR_RETURN(const Buffer all, Buffer::Allocate(communicator->size() * kBytes, stream));
  int64_t* own = all.As<int64_t>() + communicator->rank();
  DFLASH_RETURN_IF_ERROR(CopyToDevice(own, &value, kBytes, stream));
  DFLASH_RETURN_IF_ERROR(communicator->AllGather(own, all.data(), kBytes, stream));
  DFLASH_RETURN_IF_ERROR(CopyToHost(values.data(), all.data(), communicator->size() * kBytes, stream));
  return *std::min_element(values.begin(), values.end());
}

// Pages of the caches. All ranks of a group have the same, though not all have the same room for them.
absl::StatusOr<int64_t> ChoosePages(const GroupOptions& options, const MemoryDemand& demand,
                                    int64_t whole_contexts, const Stream& stream) {
  constexpr double kDefaultFraction = 0.9;
  if (options.cache_tokens > 0) return (options.cache_tokens + kPageTokens - 1) / kPageTokens;
  DFLASH_ASSIGN_OR_RETURN(const DeviceMemory memory, GetDeviceMemory(stream));
  const bool is_given = options.memory_fraction > 0;
  if (!is_given && memory.shared_by_ranks) return whole_contexts;
  const double fraction = is_given ? options.memory_fraction : kDefaultFraction;
  int64_t bytes = std::min(memory.free, static_cast<int64_t>(fraction * static_cast<double>(memory.total)));
  if (memory.shared_by_ranks && options.communicator != nullptr) bytes /= options.communicator->size();
  DFLASH_ASSIGN_OR_RETURN(const int64_t pages,
                          LeastOfRanks(PagesThatFit(demand, bytes), options.communicator, stream));
  if (pages == 0) {
    const absl::Status status =
        CheckFits({demand}, {.bytes = bytes, .reserve = kMemoryReserve, .name = "its share"});
    return absl::ResourceExhaustedError(
        absl::StrCat("--memory-fraction ", fraction, " leaves no room for a cache on some rank",
                     status.ok() ? "" : absl::StrCat(": ", status.message())));
  }
  return is_given ? pages : std::min(pages, whole_contexts);
}

// Whether what `sharers` of one memory allocate fits there. Memory that is shared, a machine's, is taken page
// by page as it is used, and what others hold of it now they may give back: there only what can never fit is
// refused.
absl::Status CheckRoom(const std::vector<MemoryDemand>& sharers, const DeviceMemory& memory, const Log& log) {
  const MemoryRoom free = {.bytes = memory.free, .reserve = kMemoryReserve, .name = "free"};
  if (!memory.shared_by_ranks) return CheckFits(sharers, free);
  DFLASH_RETURN_IF_ERROR(CheckFits(
      sharers, {.bytes = memory.total, .name = "all that this machine, or its control group, has"}));
  const absl::Status now = CheckFits(sharers, {.bytes = memory.free, .name = "free now"});
  if (!now.ok()) log(absl::StrCat("warning: pools take memory as they fill: ", now.message()));
  return absl::OkStatus();
}

}  // namespace

int64_t PrefillRows(int64_t wanted) {
  if (wanted > 0) return wanted;
  return Graph::IsCaptureCostly() ? 512 : 64;
}

absl::StatusOr<Group> LoadGroup(const GroupOptions& options, const Log& log) {
  Group group;
  const ConfigOptions config_options = {.allow_unlisted_keys = options.allow_unlisted_keys};

  // Everything is read and checked before the first weight is.
  DFLASH_ASSIGN_OR_RETURN(const TargetConfig target_config,
                          TargetConfig::Load(options.model, config_options));
  LogWarnings(target_config.warnings, log);
  DFLASH_ASSIGN_OR_RETURN(group.generation,
                          GenerationConfig::Load(options.model, target_config.vocab_size, config_options));
  LogWarnings(group.generation.warnings, log);
  DFLASH_ASSIGN_OR_RETURN(
      const TargetCheckpoint target,
      options.random_weights ? TargetCheckpoint::Random(options.model, target_config, *options.random_weights)
                             : TargetCheckpoint::Open(options.model, target_config));
  log("target: " + target.Summary());
  group.model.target_revision = target.revision();
  AddFingerprints("target", target, group);
  group.model.target_config = target_config.digest;
  group.vocabulary = target_config.vocab_size;
  absl::StatusOr<Tokenizer> tokenizer = Tokenizer::Load(options.model);
  if (tokenizer.ok()) {
    group.vocabulary = tokenizer->vocabulary_size();
    if (group.vocabulary > target_config.vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat(options.model, ": the tokenizer has ids up to ",
                                                     group.vocabulary - 1, ", the target's vocab_size is ",
                                                     target_config.vocab_size));
    }
    group.tokenizer = std::make_unique<Tokenizer>(*std::move(tokenizer));
    DFLASH_ASSIGN_OR_RETURN(group.model.tokenizer, TokenizerDigest(options.model));
  } else if (!options.random_weights || !absl::IsNotFound(tokenizer.status())) {
    return tokenizer.status();
  } else {
    log("warning: no tokenizer: requests are token ids, answers have no text");
  }
  std::optional<DraftConfig> draft_config;
  std::optional<DraftCheckpoint> draft;
  std::future<absl::StatusOr<std::map<std::string, std::string>>> digests;  // read while all else is
  if (!options.draft_model.empty()) {
    DFLASH_ASSIGN_OR_RETURN(draft_config, DraftConfig::Load(options.draft_model, config_options));
    LogWarnings(draft_config->warnings, log);
    DFLASH_RETURN_IF_ERROR(draft_config->CheckFits(target_config));
    DFLASH_ASSIGN_OR_RETURN(
        draft, options.random_weights
                   ? DraftCheckpoint::Random(options.draft_model, *draft_config, *options.random_weights)
                   : DraftCheckpoint::Open(options.draft_model, *draft_config));
    log("drafter: " + draft->Summary());
    group.model.drafter_revision = draft->revision();
    AddFingerprints("drafter", *draft, group);
    if (options.drafter_digests)
      digests = std::async(std::launch::async, [&draft] { return draft->ReadDigests(); });
    group.model.drafter_config = draft_config->digest;
    group.contract = MakeFeatureContract(*draft_config, target, *draft);
    if (!options.defect.empty()) {
      DFLASH_RETURN_IF_ERROR(PlantDefect(options.defect, group.contract));
      log("warning: planted the defect " + options.defect);
    }
    log("feature contract: " + group.contract.ToLine());
  } else if (!options.defect.empty()) {
    return absl::InvalidArgumentError("a defect needs a drafter");
  }

  group.adaptive_blocks = options.adaptive_blocks;
  group.max_verify_rows = options.max_verify_rows;
  group.max_context_tokens =
      options.max_context_tokens == 0 ? target_config.max_position_embeddings : options.max_context_tokens;
  if (group.max_context_tokens < 2 || group.max_context_tokens > target_config.max_position_embeddings) {
    return absl::InvalidArgumentError(absl::StrCat("max context tokens ", group.max_context_tokens,
                                                   " must be in [2, ", target_config.max_position_embeddings,
                                                   "]"));
  }
  DFLASH_ASSIGN_OR_RETURN(Stream stream,
                          Stream::Create({.threads = options.threads, .device = options.device}));
  group.stream = std::make_unique<Stream>(std::move(stream));
  DFLASH_ASSIGN_OR_RETURN(MemoryDemand demand, DemandOf(options, target_config, target, draft_config, draft,
                                                        group, RankOf(options), /*pages=*/1));
  const int64_t whole_contexts =
      options.max_sequences * ((group.max_context_tokens + kPageTokens - 1) / kPageTokens);
  DFLASH_ASSIGN_OR_RETURN(demand.pages, ChoosePages(options, demand, whole_contexts, *group.stream));
  if (demand.pages == whole_contexts && options.cache_tokens == 0)
    demand.pages_of_sequence = whole_contexts / options.max_sequences;
  // A request that could never fit is refused for its length, and an unset limit means what does fit.
  group.max_context_tokens = std::min(group.max_context_tokens, demand.pages * kPageTokens);
  group.memory = PlanMemory(demand);
  for (const std::string& line : group.memory.Lines()) log(line);
  std::vector<MemoryDemand> sharers = {demand};
  DFLASH_ASSIGN_OR_RETURN(const DeviceMemory memory, GetDeviceMemory(*group.stream));
  if (memory.shared_by_ranks) {
    const int64_t ranks = RankOf(options).size;
    sharers.resize(static_cast<size_t>(ranks));
    for (int64_t rank = 0; rank < ranks; ++rank) {
      MemoryDemand& sharer = sharers[static_cast<size_t>(rank)];
      DFLASH_ASSIGN_OR_RETURN(sharer, DemandOf(options, target_config, target, draft_config, draft, group,
                                               {.rank = rank, .size = ranks}, demand.pages));
      sharer.pages_of_sequence = demand.pages_of_sequence;
    }
  }
  DFLASH_RETURN_IF_ERROR(CheckRoom(sharers, memory, log));
  DFLASH_ASSIGN_OR_RETURN(SequenceTable table, SequenceTable::Create({.slots = options.max_sequences,
                                                                      .pages = demand.pages,
                                                                      .max_tokens = group.max_context_tokens},
                                                                     *group.stream));
  group.table = std::make_unique<SequenceTable>(std::move(table));

  Target::Options target_options;
  target_options.max_prefill_rows = demand.prefill_rows;
  target_options.checkpoints = options.checkpoints;
  target_options.max_block_rows = draft_config ? group.contract.block_size : 1;
  target_options.max_verify_rows = options.max_sequences * target_options.max_block_rows;
  if (draft_config) target_options.taps = group.contract.taps;
  target_options.communicator = options.communicator;
  target_options.draft_placement = options.draft_placement;
  target_options.shard_residual_rows = options.shard_residual_rows;
  ProgressLog target_progress("target", demand.target_weight_bytes, log);
  DFLASH_ASSIGN_OR_RETURN(group.target, Target::Load(target_config, target, target_options, group.table.get(),
                                                     *group.stream, [&](int64_t bytes) {
                                                       group.bytes_read += bytes;
                                                       target_progress.Add(bytes);
                                                     }));
  target_progress.Finish();
  if (!draft_config) return group;
  if (group.target->communicator().rank() > 0 && options.draft_placement == DraftPlacement::kRankZero) {
    DFLASH_ASSIGN_OR_RETURN(group.drafter,
                            DraftFollower::Create({.block_size = group.contract.block_size,
                                                   .max_sequences = options.max_sequences,
                                                   .vocabulary = group.vocabulary},
                                                  group.target.get(), group.table.get(), *group.stream));
    return group;
  }
  ProgressLog draft_progress("drafter", demand.drafter_weight_bytes, log);
  DFLASH_ASSIGN_OR_RETURN(
      std::unique_ptr<DFlashDrafter> dflash,
      DFlashDrafter::Load(*draft_config, *draft, group.contract,
                          {.max_sequences = options.max_sequences,
                           .max_ingest_rows = demand.prefill_rows,
                           .vocabulary = group.vocabulary},
                          group.target.get(), group.table.get(), *group.stream, [&](int64_t bytes) {
                            group.bytes_read += bytes;
                            draft_progress.Add(bytes);
                          }));
  group.dflash = dflash.get();
  group.drafter = std::move(dflash);
  draft_progress.Finish();
  if (digests.valid()) {
    DFLASH_ASSIGN_OR_RETURN(const auto of_drafter, digests.get());
    for (const auto& [name, digest] : of_drafter)
      group.fingerprints[absl::StrCat("whole drafter ", name)] = digest;
  }
  if (!options.defect.empty()) {
    DFLASH_ASSIGN_OR_RETURN(group.drafter,
                            PlantDefect(options.defect, group.contract, std::move(group.drafter),
                                        group.table.get(), *group.stream));
  }
  return group;
}

absl::StatusOr<std::unique_ptr<Engine>> Group::MakeEngine(int64_t max_prefill_tokens, StepObserver* observer,
                                                          RankLeader* ranks) const {
  EngineOptions options;
  options.max_context_tokens = max_context_tokens;
  options.max_prefill_tokens = PrefillRows(max_prefill_tokens);
  options.adaptive_blocks = adaptive_blocks;
  if (adaptive_blocks) options.least_survival = kLeastSurvival;
  options.max_verify_rows = max_verify_rows;
  options.vocabulary = vocabulary;
  options.turn_end_tokens = generation.eos_token_ids;
  options.observer = observer;
  options.ranks = ranks;
  DFLASH_ASSIGN_OR_RETURN(
      std::unique_ptr<Engine> engine,
      Engine::Create(options, target.get(), drafter.get(), table.get(), tokenizer.get(), *stream));
  DFLASH_RETURN_IF_ERROR(engine->WarmUp(kWarmSequences));
  return engine;
}

absl::StatusOr<std::unique_ptr<RankFollower>> Group::MakeFollower() const {
  return RankFollower::Create({.vocabulary = vocabulary}, target.get(), drafter.get(), table.get(), *stream);
}

}  // namespace dflash
