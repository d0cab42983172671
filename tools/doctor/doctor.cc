#include "tools/doctor/doctor.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "kernels/device/buffer.h"
#include "kernels/device/describe.h"
#include "text/tokenizer.h"
#include "tools/doctor/checks.h"
#include "tools/doctor/draft_reference.h"
#include "tools/doctor/engine_checks.h"
#include "tools/doctor/probe.h"
#include "tools/doctor/ranks.h"
#include "tools/doctor/revisions.h"
#include "tools/doctor/weights_scan.h"
#include "worker/load_group.h"
#include "worker/model/checkpoint.h"
#include "worker/model/draft_config.h"
#include "worker/model/target_config.h"

namespace dflash::doctor {
namespace {

constexpr int64_t kLeastContext = 512;
constexpr int64_t kDefaultContext = 4096;

// Prompts when there is no bundle.
constexpr const char* kBuiltInPrompts[] = {
    "Count from 3 to 30 in steps of 3. 3, 6, 9, 12, 15, 18, 21, 24, 27, 30. "
    "Count from 5 to 50 in steps of 5. 5, 10, 15, 20,",
    "def largest(numbers):\n    \"\"\"Returns the largest of a list of numbers.\"\"\"\n"
    "    best = numbers[0]\n    for number in",
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the lazy dog. "
    "The quick brown"};

// A run of the doctor over one pair.
class Examination {
 public:
  explicit Examination(const DoctorOptions& options) : options_(options) {}

  absl::Status Run();
  Report report;

 private:
  bool Stops() const { return overflows_ || (options_.stop_at_first_failure && report.broken()); }
  void Log(const std::string& line) const {
    if (options_.log) options_.log(line);
  }
  absl::Status OpenBundle();
  // The interfaces files and weights; leaves target_ and drafter_ when they can be examined.
  absl::Status OpenPair();
  absl::Status CheckWeights();  // that they are numbers, and the recorded ones
  void CheckConfig();
  absl::Status CheckTexts();
  absl::Status ChooseSequences();
  absl::Status ExamineDrafting();
  absl::StatusOr<std::optional<int32_t>> TokenOfAnotherEmbedding(int32_t token);
  absl::Status ExamineRounds();

  DoctorOptions options_;
  bool overflows_ = false;  // numbers are beyond float32's range: what is computed from them says nothing
  std::optional<GoldenBundle> bundle_;
  std::optional<TargetConfig> target_config_;
  std::optional<DraftConfig> draft_config_;
  std::optional<TargetCheckpoint> target_;
  std::optional<DraftCheckpoint> drafter_;
  std::unique_ptr<DraftReference> reference_;
  std::unique_ptr<Ranks> ranks_;
  Subject subject_;

  // The prompts that are drafted from, their anchors, and which of the bundle's they are.
  std::vector<std::vector<int32_t>> prompts_;
  std::vector<int32_t> anchors_;
  std::vector<std::optional<size_t>> golden_;
  std::vector<int32_t> long_prompt_;
};

absl::Status Examination::OpenBundle() {
  std::string folder = options_.golden;
  if (folder.empty() && std::filesystem::exists(options_.draft_model + "/golden/bundle.json"))
    folder = options_.draft_model + "/golden";
  if (folder.empty()) {
    report.facts.emplace_back("golden", "none: config, taps, masks and positions cannot be checked");
    return absl::OkStatus();
  }
  absl::StatusOr<GoldenBundle> bundle = GoldenBundle::Open(folder);
  // Whatever the reason, the input is bad.
  if (!bundle.ok()) return absl::InvalidArgumentError(bundle.status().message());
  bundle_ = *std::move(bundle);
  report.advice = "The rows say what it would take.";
  report.facts.emplace_back("golden", absl::StrCat(folder, " (", bundle_->producer(), ")"));
  return absl::OkStatus();
}

absl::Status Examination::OpenPair() {
  const ConfigOptions config_options = {.allow_unlisted_keys = options_.allow_unlisted_keys};
  const std::string of_target =
      absl::StrCat("--model ", options_.model, ": config.json and weights of the target");
  const std::string of_drafter =
      absl::StrCat("--draft-model ", options_.draft_model, ": config.json and weights of the drafter");
  const auto fail = [&](const char* id, const absl::Status& status, const std::string& where) {
    report.FailInput(absl::IsNotFound(status) ? "files" : id, std::string(status.message()), where);
    return absl::OkStatus();
  };
  absl::StatusOr<TargetConfig> target_config = TargetConfig::Load(options_.model, config_options);
  if (!target_config.ok()) return fail("config", target_config.status(), of_target);
  absl::StatusOr<DraftConfig> draft_config = DraftConfig::Load(options_.draft_model, config_options);
  if (!draft_config.ok()) return fail("config", draft_config.status(), of_drafter);
  if (absl::Status fits = draft_config->CheckFits(*target_config); !fits.ok())
    return fail("config", fits, absl::StrCat(of_drafter, "; is it the drafter of this target?"));
  if (target_config->max_position_embeddings < kLeastContext) {
    return fail("config",
                absl::InvalidArgumentError(
                    absl::StrCat("max_position_embeddings: ", target_config->max_position_embeddings,
                                 ", but the doctor needs a context of ", kLeastContext, " tokens")),
                of_target);
  }
  DFLASH_ASSIGN_OR_RETURN(options_.max_context_tokens, ContextTokens(options_, *target_config));
  target_config_ = *std::move(target_config);
  draft_config_ = *std::move(draft_config);
  absl::StatusOr<TargetCheckpoint> target = TargetCheckpoint::Open(options_.model, *target_config_);
  if (!target.ok()) return fail("files", target.status(), of_target);
  absl::StatusOr<DraftCheckpoint> drafter = DraftCheckpoint::Open(options_.draft_model, *draft_config_);
  if (!drafter.ok()) return fail("files", drafter.status(), of_drafter);
  target_ = *std::move(target);
  drafter_ = *std::move(drafter);
  report.facts.emplace_back("target",
                            absl::StrCat(options_.model, ", revision ", target_->revision().substr(0, 12)));
  report.facts.emplace_back(
      "drafter", absl::StrCat(options_.draft_model, ", revision ", drafter_->revision().substr(0, 12)));
  report.Pass("files", 0, 0, "the tensors that the configurations call for",
              absl::StrCat("target ", target_->Summary(), "; drafter ", drafter_->Summary()));
  reference_ = std::make_unique<DraftReference>(*draft_config_, *drafter_, *target_);
  subject_.reference = reference_.get();
  subject_.target_config = &*target_config_;
  subject_.own = ContractOf(*draft_config_);
  return absl::OkStatus();
}

void Examination::CheckConfig() {
  if (!bundle_) {
    return report.NotChecked(
        "config",
        "needs a golden bundle: whoever reads the same keys with the same code shares its mistakes");
  }
  const std::string differences = Differences(subject_.own, bundle_->contract());
  report.Judge("config", differences.empty() ? 0 : 1, 0, "literals of the golden bundle",
               differences.empty()
                   ? std::string("taps, masks, windows, theta, mask id and block size are the recorded ones")
                   : differences,
               absl::StrCat("config.json says otherwise: ", differences));
}

absl::Status Examination::CheckWeights() {
  Log("reading all weights");
  const std::pair<const char*, const Checkpoint*> models[] = {{"target", &*target_}, {"drafter", &*drafter_}};
  report.Pass("weights", 0, 0, "finite numbers", "every element of every tensor");
  TensorDigests own[2], recorded[2];
  if (bundle_) {
    recorded[0] = {.samples = bundle_->target_weights(), .whole = bundle_->target_digests()};
    recorded[1] = {.samples = bundle_->drafter_weights(), .whole = bundle_->drafter_digests()};
  }
  for (size_t i = 0; i < 2; ++i) {
    const auto& [whose, checkpoint] = models[i];
    DFLASH_ASSIGN_OR_RETURN(WeightsScan scan, ScanWeights(*checkpoint, !recorded[i].whole.empty()));
    own[i] = {.samples = checkpoint->fingerprints(), .whole = std::move(scan.digests)};
    if (scan.no_numbers.empty() || report.Of("weights").outcome == Outcome::kFail) continue;
    report.Fail("weights", absl::StrCat(whose, " ", scan.no_numbers),
                absl::StrCat("weights of the ", whose, " are no numbers: ", scan.no_numbers), Blame::kModel);
  }
  if (!bundle_) {
    report.NotChecked("revisions", "needs a golden bundle");
    return absl::OkStatus();
  }
  DFLASH_RETURN_IF_ERROR(bundle_->CheckFits(golden::SizesOf(*target_config_)));
  if (const int64_t mask = bundle_->contract().mask_token_id; mask >= target_config_->vocab_size) {
    return absl::InvalidArgumentError(
        absl::StrCat(bundle_->folder(), "/bundle.json: contract: mask_token_id: token id ", mask,
                     ", but the target's vocabulary has ", target_config_->vocab_size));
  }
  for (size_t i = 0; i < 2; ++i) {
    const auto& [whose, checkpoint] = models[i];
    for (const auto& [digests, key] :
         {std::pair(&recorded[i].samples, "_weights: "), std::pair(&recorded[i].whole, "_digests: ")}) {
      for (const auto& [name, digest] : *digests) {
        if (checkpoint->Find(name) != nullptr) continue;
        return absl::InvalidArgumentError(absl::StrCat(bundle_->folder(), "/bundle.json: ", whose, key,
                                                       name.substr(0, 128), ": the ", whose,
                                                       " has no such tensor"));
      }
    }
  }
  JudgeRevisions(CompareWeights(own[0], recorded[0]), CompareWeights(own[1], recorded[1]), &report);
  subject_.target_recorded = report.target_weights != Weights::kOther;
  subject_.drafter_recorded = report.drafter_weights != Weights::kOther;
  return absl::OkStatus();
}

absl::Status Examination::CheckTexts() {
  const absl::StatusOr<Tokenizer> tokenizer = Tokenizer::Load(options_.model);
  if (!tokenizer.ok()) {
    report.FailInput("tokenizer", std::string(tokenizer.status().message()),
                     absl::StrCat("--model ", options_.model, ": tokenizer.json"));
    return absl::OkStatus();
  }
  subject_.vocabulary = tokenizer->vocabulary_size();
  DFLASH_RETURN_IF_ERROR(CheckTokenizer(subject_, *tokenizer));
  return CheckTemplate(subject_, options_.model, options_.defect);
}

absl::Status Examination::ChooseSequences() {
  const int64_t block = draft_config_->block_size;
  const auto fits = [&](size_t length) {
    return static_cast<int64_t>(length) + block <= options_.max_context_tokens;
  };
  std::vector<int32_t> all;
  if (bundle_) {
    for (size_t i = 0; i < bundle_->prompts().size(); ++i) {
      const GoldenPrompt& prompt = bundle_->prompts()[i];
      all.insert(all.end(), prompt.prompt_ids.begin(), prompt.prompt_ids.end());
      if (!bundle_->HasTensors(i) || !fits(prompt.prompt_ids.size())) continue;
      prompts_.push_back(prompt.prompt_ids);
      anchors_.push_back(prompt.output_ids[0]);
      golden_.emplace_back(i);
    }
  } else {
    DFLASH_ASSIGN_OR_RETURN(const Tokenizer tokenizer, Tokenizer::Load(options_.model));
    for (const char* text : kBuiltInPrompts) {
      DFLASH_ASSIGN_OR_RETURN(std::vector<int32_t> ids, tokenizer.Encode(text, AddedTokens::kAsText));
      all.insert(all.end(), ids.begin(), ids.end());
    }
  }
  // First a prompt that no window reaches, so that it shows causality alone.
  int64_t window = options_.max_context_tokens;
  int64_t longest_window = 0;
  for (const DraftLayerMask& mask : subject_.contract().layers) {
    if (mask.window > 0) window = std::min(window, mask.window);
    longest_window = std::max(longest_window, mask.window);
  }
  const int64_t brief = std::clamp<int64_t>(window - block, 2, 24);
  prompts_.insert(prompts_.begin(),
                  {all.begin(), all.begin() + std::min<int64_t>(brief, static_cast<int64_t>(all.size()))});
  anchors_.insert(anchors_.begin(), all[all.size() / 2]);
  golden_.insert(golden_.begin(), std::nullopt);
  // Then one that is longer than every window, not a whole number of pages, and in more than two pieces.
  const int64_t length =
      std::min(std::max<int64_t>(longest_window + 77, 147), options_.max_context_tokens - block);
  while (static_cast<int64_t>(long_prompt_.size()) < length) {
    const int64_t count = std::min<int64_t>(static_cast<int64_t>(all.size()),
                                            length - static_cast<int64_t>(long_prompt_.size()));
    long_prompt_.insert(long_prompt_.end(), all.begin(), all.begin() + count);
  }
  return absl::OkStatus();
}

// One of the next tokens whose embedding is not the same; none: they are all alike.
absl::StatusOr<std::optional<int32_t>> Examination::TokenOfAnotherEmbedding(int32_t token) {
  constexpr int64_t kTried = 64;
  DFLASH_ASSIGN_OR_RETURN(const Rows own, reference_->Embedding({token}));
  for (int64_t i = 1; i <= kTried; ++i) {
    const auto other = static_cast<int32_t>((token + i) % subject_.vocabulary);
    DFLASH_ASSIGN_OR_RETURN(const Rows embedding, reference_->Embedding({other}));
    if (!(embedding == own)) return other;
  }
  return std::nullopt;
}

absl::Status Examination::ExamineDrafting() {
  Log("draft passes");
  Sequences sequences;
  sequences.golden = golden_;
  for (size_t i = 0; i < prompts_.size(); ++i) {
    DFLASH_ASSIGN_OR_RETURN(SequenceRecord record, ranks_->Measure<SequenceRecord>([&](Probe& probe) {
      return probe.RunSequence(prompts_[i], anchors_[i], kPageTokens);
    }));
    sequences.records.push_back(std::move(record));
  }
  std::vector<int32_t> changed = prompts_[0];
  sequences.perturbed_at = static_cast<int64_t>(changed.size()) / 2;
  int32_t& token = changed[static_cast<size_t>(sequences.perturbed_at)];
  DFLASH_ASSIGN_OR_RETURN(const std::optional<int32_t> other, TokenOfAnotherEmbedding(token));
  if (other) {
    token = *other;
    DFLASH_ASSIGN_OR_RETURN(sequences.perturbed, ranks_->Measure<SequenceRecord>([&](Probe& probe) {
      return probe.RunSequence(changed, anchors_[0], kPageTokens);
    }));
  }
  DFLASH_RETURN_IF_ERROR(CheckTarget(subject_, sequences));
  DFLASH_RETURN_IF_ERROR(CheckTaps(subject_, sequences));
  DFLASH_RETURN_IF_ERROR(CheckContext(subject_, sequences));
  DFLASH_RETURN_IF_ERROR(CheckBlock(subject_, sequences.records[0]));
  DFLASH_RETURN_IF_ERROR(CheckDrafts(subject_, sequences.records[0].pass));
  for (const char* id : {"fusion", "injection", "rope", "masks", "draft-layers", "positions"})
    overflows_ |= report.Of(id).outcome == Outcome::kFail && report.Of(id).blame == Blame::kModel;
  overflows_ |= !reference_->fits_float32();  // of logits
  if (Stops()) return absl::OkStatus();

  Log("long context, chunks, company");
  const int32_t anchor = long_prompt_.back();
  SequenceRecord whole, chunked;
  for (const bool in_one : {true, false}) {
    DFLASH_ASSIGN_OR_RETURN((in_one ? whole : chunked), ranks_->Measure<SequenceRecord>([&](Probe& probe) {
      return probe.RunSequence(long_prompt_, anchor,
                               in_one ? std::max<int64_t>(kPrefillTokens, kPageTokens) : kPageTokens);
    }));
  }
  DFLASH_RETURN_IF_ERROR(CheckLongContext(subject_, whole, chunked, sequences.records[0]));
  DFLASH_ASSIGN_OR_RETURN(const std::optional<MaskOutput> output, OutputForMask(subject_));
  const Rows replacement = output ? output->y : Rows(1, target_config_->hidden_size);
  const std::vector<const SequenceRecord*> alone = {&sequences.records[0], &chunked};
  DFLASH_ASSIGN_OR_RETURN(const Probe::Together together, ranks_->Measure<Probe::Together>([&](Probe& probe) {
    return probe.RunTogether(alone, replacement);
  }));
  CheckTogether(subject_, together, alone, output);
  return CheckDraftLogits(subject_, sequences);
}

absl::Status Examination::ExamineRounds() {
  Log("rounds with a wrong draft at every depth");
  DFLASH_ASSIGN_OR_RETURN(const RoundsRecord rounds, ranks_->Measure<RoundsRecord>([&](Probe& probe) {
    return probe.RunRounds(prompts_[0], anchors_[0]);
  }));
  std::vector<int32_t> rows = {anchors_[0]};
  rows.insert(rows.end(), rounds.continuation.begin(),
              rounds.continuation.begin() + draft_config_->block_size - 1);
  DFLASH_ASSIGN_OR_RETURN(
      const Probe::VerifyRecord verify,
      ranks_->Measure<Probe::VerifyRecord>([&](Probe& probe) { return probe.RunVerify(prompts_[0], rows); }));
  CheckVerifyRows(subject_, verify);
  CheckRounds(subject_, rounds, draft_config_->block_size);
  return absl::OkStatus();
}

absl::Status Examination::Run() {
  if (options_.ranks < 1 || options_.ranks > 8) return absl::InvalidArgumentError("ranks must be in [1, 8]");
  if (options_.max_context_tokens != 0 && options_.max_context_tokens < kLeastContext) {
    return absl::InvalidArgumentError(absl::StrCat("--max-context-tokens ", options_.max_context_tokens,
                                                   ": the doctor needs a context of ", kLeastContext,
                                                   " tokens"));
  }
  subject_.report = &report;
  report.what_tells =
      "a golden bundle of another implementation with fingerprints and digests of every tensor, recorded "
      "acceptance and tensors (docs/golden-bundle.md)";
  DFLASH_RETURN_IF_ERROR(OpenBundle());
  if (bundle_) subject_.bundle = &*bundle_;
  DFLASH_RETURN_IF_ERROR(OpenPair());
  if (drafter_) {
    DFLASH_RETURN_IF_ERROR(CheckWeights());
    CheckConfig();
  }
  report.facts.emplace_back("backend",
                            absl::StrCat(BackendName(), ", activations in ", Name(ActivationDType()), ", ",
                                         options_.ranks, options_.ranks == 1 ? " rank" : " ranks"));
  if (!options_.defect.empty()) report.facts.emplace_back("planted", options_.defect);
  if (!drafter_ || report.Of("weights").outcome == Outcome::kFail) return absl::OkStatus();
  subject_.gates = GatesFor(ActivationDType());
  DFLASH_RETURN_IF_ERROR(CheckTexts());
  if (Stops() || subject_.vocabulary == 0) return absl::OkStatus();
  // A configuration that reads otherwise than recorded would have the masks of other layers compared.
  if (bundle_ && (bundle_->contract().layers.size() != subject_.own.layers.size() ||
                  bundle_->contract().block_size != subject_.own.block_size)) {
    return absl::OkStatus();
  }
  DFLASH_RETURN_IF_ERROR(ChooseSequences());
  Log("loading");
  DFLASH_ASSIGN_OR_RETURN(ranks_, Ranks::Load(options_));
  DFLASH_RETURN_IF_ERROR(ExamineDrafting());
  if (Stops()) return absl::OkStatus();
  DFLASH_RETURN_IF_ERROR(ExamineRounds());
  if (Stops()) return absl::OkStatus();
  Log("generation");
  return CheckEngine(subject_, *ranks_, long_prompt_, options_.max_prompts);
}

}  // namespace

absl::StatusOr<int64_t> ContextTokens(const DoctorOptions& options, const TargetConfig& target) {
  const int64_t most = target.max_position_embeddings;
  if (options.max_context_tokens == 0) return std::min(kDefaultContext, most);
  if (options.max_context_tokens > most) {
    return absl::InvalidArgumentError(absl::StrCat("--max-context-tokens ", options.max_context_tokens, ": ",
                                                   options.model, " has positions for ", most, " tokens"));
  }
  return options.max_context_tokens;
}

absl::StatusOr<Report> RunDoctor(const DoctorOptions& options) {
  const absl::Time start = absl::Now();
  Examination examination(options);
  DFLASH_RETURN_IF_ERROR(examination.Run());
  examination.report.Settle();
  examination.report.seconds = absl::ToDoubleSeconds(absl::Now() - start);
  return std::move(examination.report);
}

}  // namespace dflash::doctor
