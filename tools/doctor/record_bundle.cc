#include "tools/doctor/record_bundle.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/describe.h"
#include "tools/doctor/probe.h"
#include "tools/doctor/ranks.h"
#include "worker/golden/golden_bundle.h"
#include "worker/model/checkpoint.h"
#include "worker/model/draft_config.h"
#include "worker/model/target_config.h"

namespace dflash::doctor {

using golden::ContractOf;
using golden::GoldenBundle;
using golden::GoldenPrompt;
using golden::RecordedBundle;

namespace {

// What cannot be opened is bad input, whatever the reason.
template <typename T>
absl::StatusOr<T> AsInput(absl::StatusOr<T> opened) {
  if (!opened.ok()) return absl::InvalidArgumentError(opened.status().message());
  return opened;
}

}  // namespace

absl::Status RecordBundle(const DoctorOptions& options, const std::string& folder, int64_t tensor_prompts,
                          int64_t max_tokens) {
  if (std::filesystem::exists(folder))
    return absl::AlreadyExistsError(absl::StrCat("--out ", folder, " exists"));
  DFLASH_ASSIGN_OR_RETURN(const GoldenBundle from, AsInput(GoldenBundle::Open(options.golden)));
  DFLASH_ASSIGN_OR_RETURN(const TargetConfig target_config, AsInput(TargetConfig::Load(options.model)));
  DFLASH_ASSIGN_OR_RETURN(const DraftConfig draft_config, AsInput(DraftConfig::Load(options.draft_model)));
  DFLASH_ASSIGN_OR_RETURN(const TargetCheckpoint target,
                          AsInput(TargetCheckpoint::Open(options.model, target_config)));
  DFLASH_ASSIGN_OR_RETURN(const DraftCheckpoint drafter,
                          AsInput(DraftCheckpoint::Open(options.draft_model, draft_config)));
  DFLASH_RETURN_IF_ERROR(from.CheckFits(golden::SizesOf(target_config)));
  RecordedBundle bundle;
  bundle.producer = absl::StrCat("dflashd, ", BackendName());
  bundle.contract = ContractOf(draft_config);
  bundle.target_weights = target.fingerprints();
  bundle.drafter_weights = drafter.fingerprints();
  DFLASH_ASSIGN_OR_RETURN(bundle.target_digests, target.ReadDigests());
  DFLASH_ASSIGN_OR_RETURN(bundle.drafter_digests, drafter.ReadDigests());
  DoctorOptions one = options;
  one.ranks = 1;
  DFLASH_ASSIGN_OR_RETURN(one.max_context_tokens, ContextTokens(options, target_config));
  DFLASH_ASSIGN_OR_RETURN(const std::unique_ptr<Ranks> ranks, Ranks::Load(one));
  Probe::Wave requests;
  for (const GoldenPrompt& prompt : from.prompts()) {
    GenerationRequest request;
    request.prompt_tokens = prompt.prompt_ids;
    request.max_tokens = max_tokens;
    request.stop_token_ids = ranks->leader().generation.eos_token_ids;
    requests.push_back(std::move(request));
  }
  DFLASH_ASSIGN_OR_RETURN(const Probe::EngineRuns runs, ranks->Measure<Probe::EngineRuns>([&](Probe& probe) {
    return probe.RunEngine({requests}, kPrefillTokens);
  }));
  bundle.prompts = from.prompts();
  for (size_t i = 0; i < bundle.prompts.size(); ++i) {
    GoldenPrompt& prompt = bundle.prompts[i];
    DFLASH_RETURN_IF_ERROR(Annotate(runs.waves[0][i].status, absl::StrCat(from.folder(), ": prompt ", i)));
    prompt.output_ids = runs.waves[0][i].tokens;
    prompt.acceptance_lengths.clear();
    for (const RoundReport& round : runs.waves[0][i].rounds)
      prompt.acceptance_lengths.push_back(round.accepted + 1);
  }
  // The tensors, of the prompts that have them in the bundle that the prompts come from, else of the first
  // ones.
  std::vector<size_t> chosen;
  for (size_t i = 0; i < bundle.prompts.size(); ++i) {
    if (from.HasTensors(i)) chosen.push_back(i);
  }
  for (size_t i = 0; i < bundle.prompts.size() && chosen.empty(); ++i) chosen.push_back(i);
  if (static_cast<int64_t>(chosen.size()) > tensor_prompts)
    chosen.resize(static_cast<size_t>(tensor_prompts));
  for (const size_t i : chosen) {
    const GoldenPrompt& prompt = bundle.prompts[i];
    DFLASH_ASSIGN_OR_RETURN(const SequenceRecord record, ranks->Measure<SequenceRecord>([&](Probe& probe) {
      return probe.RunSequence(prompt.prompt_ids, prompt.output_ids.at(0), kPageTokens);
    }));
    const std::string prefix = absl::StrCat("p", i, ".");
    Rows states;
    for (const Rows& state : record.hidden_states) states.Append(state);
    bundle.tensors.push_back(
        {prefix + "hidden_states",
         {static_cast<int64_t>(record.hidden_states.size()), record.hidden_states[0].rows, states.cols},
         states.values});
    // Without the padding of the head.
    const int64_t vocabulary = target_config.vocab_size;
    bundle.tensors.push_back(
        {prefix + "last_logits", {vocabulary}, record.last_logits.Columns(0, vocabulary).values});
    const auto last16 = [&](const char* name, const Rows& rows) {
      const int64_t count = std::min<int64_t>(16, rows.rows);
      bundle.tensors.push_back(
          {prefix + name, {count, rows.cols}, rows.Slice(rows.rows - count, count).values});
    };
    last16("taps_last16", record.taps);
    last16("context_feature_last16", record.features);
    bundle.tensors.push_back({prefix + "draft_logits",
                              {record.pass.logits.rows, vocabulary},
                              record.pass.logits.Columns(0, vocabulary).values});
  }
  return WriteBundle(bundle, folder);
}

}  // namespace dflash::doctor
