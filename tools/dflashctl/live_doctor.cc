#include "tools/dflashctl/live_doctor.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "dflash/v1/admin.grpc.pb.h"
#include "tools/dflashctl/block_cuts.h"
#include "tools/dflashctl/commands.h"
#include "tools/dflashctl/greedy_request.h"
#include "tools/dflashctl/paired_acceptance.h"
#include "tools/doctor/recorded_acceptance.h"
#include "tools/doctor/revisions.h"
#include "worker/model/feature_contract.h"

namespace dflash::ctl {
namespace {

using doctor::Report;
using golden::GoldenBundle;
using golden::GoldenPrompt;

std::map<std::string, std::string> Fields(const std::string& line) {
  std::map<std::string, std::string> fields;
  for (const std::string& field : std::vector<std::string>(absl::StrSplit(line, ' ', absl::SkipEmpty()))) {
    const size_t equals = field.find('=');
    if (equals == std::string::npos || field.substr(0, equals).ends_with("_revision")) continue;
    fields[field.substr(0, equals)] = field.substr(equals + 1);
  }
  return fields;
}

std::vector<int32_t> Accepted(const Generation& generation) {
  std::vector<int32_t> accepted;
  for (const v1::StepInfo& round : generation.rounds)
    accepted.push_back(static_cast<int32_t>(round.accepted()));
  return accepted;
}

double TokensPerRound(const Generation& generation) {
  double sum = 0;
  for (const v1::StepInfo& round : generation.rounds) sum += round.accepted();
  return generation.rounds.empty() ? 0 : 1 + sum / static_cast<double>(generation.rounds.size());
}

class Examination {
 public:
  Examination(Connection& connection, const Endpoint* admin, const GoldenBundle& bundle, Report* report)
      : connection_(connection), admin_(admin), bundle_(bundle), report_(report) {}

  grpc::Status Run(int64_t max_prompts);

 private:
  grpc::Status CheckIdentity();
  // As it is once everything that has been generated so far is in it.
  grpc::Status AwaitDiagnosis(const v1::GetDiagnosisResponse& before, v1::GetDiagnosisResponse* diagnosis);
  grpc::Status CheckPrompts();
  // Also `prompts_`, which are generated.
  grpc::Status CheckText(int64_t max_prompts);
  // Last: its rounds are sound ones also where others are not, and the server's own verdict counts them.
  grpc::Status CheckContextUpdate();
  grpc::Status CheckPrefix();
  void CheckAcceptance();
  // Where the server refuses to draft: what the target says to a few golden prompts.
  grpc::Status ReadTexts(int64_t max_prompts);
  // Report::target_text, of how many texts are others than recorded.
  void JudgeTexts(int64_t texts, int64_t other);
  DType activations() const { return ActivationsOf(model_.backend()); }
  bool Fits(const GoldenPrompt& prompt) const {
    return prompt.prompt_ids.size() + prompt.output_ids.size() <= model_.max_context_tokens();
  }
  grpc::Status Generate(const v1::GenerateRequest& request, Generation* generation) {
    const grpc::Status status = connection_.Generate(request, absl::InfiniteDuration(), nullptr, generation);
    for (const v1::StepInfo& round : generation->rounds) own_rounds_ += round.drafted() > 0;
    return status;
  }
  // All at once.
  grpc::Status GenerateAll(const std::vector<v1::GenerateRequest>& requests,
                           std::vector<Generation>* generations) {
    generations->assign(requests.size(), {});
    const auto count = static_cast<int64_t>(requests.size());
    return RunConcurrently(count, count, [&](int64_t i) {
      return Generate(requests[static_cast<size_t>(i)], &(*generations)[static_cast<size_t>(i)]);
    });
  }

  Connection& connection_;
  const Endpoint* const admin_;  // null: not to be asked
  const GoldenBundle& bundle_;
  std::atomic<uint64_t> own_rounds_ = 0;
  Report* report_;
  v1::GetModelInfoResponse model_;
  std::vector<size_t> prompts_;  // of the bundle
  // For each of them, and what came when it ran alone.
  std::vector<v1::GenerateRequest> requests_;
  std::vector<Generation> alone_;
};

grpc::Status Examination::CheckIdentity() {
  if (const grpc::Status status = connection_.GetModelInfo(&model_); !status.ok()) return status;
  report_->facts.emplace_back(
      "model", absl::StrCat(model_.model(), ", ", model_.backend(), ", ", model_.tensor_parallel_size(),
                            " ranks, dflashd ", model_.server_version()));
  report_->facts.emplace_back("contract", model_.feature_contract());
  report_->facts.emplace_back("golden", absl::StrCat(bundle_.folder(), " (", bundle_.producer(), ")"));
  if (!model_.has_drafter() && model_.feature_contract().empty())
    return grpc::Status(grpc::StatusCode::FAILED_PRECONDITION, "the server has no drafter");
  report_->advice =
      "What needs tensors says dflashctl doctor --model DIR --draft-model DIR --golden DIR, on the folders "
      "that the server reads.";
  for (const doctor::Interface& interface : doctor::Interfaces()) {
    report_->NotChecked(interface.id,
                        "not visible from outside: dflashctl doctor --model DIR --draft-model DIR");
  }
  if (admin_ == nullptr) {
    report_->NotChecked("revisions",
                        "the server tells its weights' fingerprints on the operators' port: --admin-address");
  }
  const absl::Status fits = bundle_.CheckFits({.vocabulary = model_.vocabulary_size()});
  if (!fits.ok()) {
    report_->FailInput("tokenizer", std::string(fits.message()),
                       "--golden: is it a bundle of the served pair?");
    return grpc::Status::OK;
  }
  const std::string differences = ContractDifferences(model_.feature_contract(), bundle_.contract());
  report_->Judge("config", differences.empty() ? 0 : 1, 0, "the server's feature contract against the bundle",
                 differences.empty() ? std::string("every field of the contract agrees") : differences,
                 absl::StrCat("the server reads the drafter otherwise than recorded: ", differences));
  if (!model_.has_drafter()) {
    report_->facts.emplace_back("speculation", "refused by the server");
    report_->Fail("end-to-end", "the server has a drafter and refuses to draft: its self-test failed",
                  "what the self-test found (--admin-address, dflashctl status, or the server's log)",
                  doctor::Blame::kUnsettled);
    return grpc::Status::OK;
  }
  report_->Judge("block-size",
                 std::abs(static_cast<double>(model_.drafter().block_size()) -
                          static_cast<double>(bundle_.contract().block_size)),
                 0, "literals of the golden bundle", absl::StrCat("block of ", model_.drafter().block_size()),
                 "block_size of another drafter");
  return grpc::Status::OK;
}

uint64_t Rounds(const v1::GetDiagnosisResponse& diagnosis) {
  uint64_t rounds = 0;
  for (const v1::GroupDiagnosis& group : diagnosis.groups()) rounds += group.rounds();
  return rounds;
}

grpc::Status Examination::AwaitDiagnosis(const v1::GetDiagnosisResponse& before,
                                         v1::GetDiagnosisResponse* diagnosis) {
  // Groups report once a second. Rounds of others, also of before, are among those counted: so as many may be
  // there before all of our own are, and a report is due after them in any case.
  const absl::Time report = absl::Now() + absl::Milliseconds(1500);
  const absl::Time deadline = absl::Now() + absl::Seconds(5);
  for (;;) {
    diagnosis->Clear();
    if (const grpc::Status status = GetDiagnosis(connection_, *admin_, diagnosis); !status.ok())
      return status;
    const absl::Time now = absl::Now();
    const bool counted = Rounds(*diagnosis) - Rounds(before) >= own_rounds_;
    if ((counted && now > report) || now > deadline) return grpc::Status::OK;
    absl::SleepFor(absl::Milliseconds(100));
  }
}

grpc::Status Examination::CheckPrompts() {
  int64_t texts = 0, wrong_texts = 0, chats = 0, wrong_chats = 0;
  for (const GoldenPrompt& prompt : bundle_.prompts()) {
    if (prompt.text.empty()) continue;
    v1::TokenizeRequest request;
    request.set_text(prompt.text);
    v1::TokenizeResponse response;
    if (const grpc::Status status = connection_.Tokenize(request, &response); !status.ok()) return status;
    ++texts;
    wrong_texts += !std::equal(response.token_ids().begin(), response.token_ids().end(),
                               prompt.prompt_ids.begin(), prompt.prompt_ids.end());
    if (!prompt.chat) continue;
    v1::RenderChatRequest render;
    bool plain = true;  // only role and content
    for (const auto& message : prompt.chat->messages) {
      plain &= message.is_object() && message.size() == 2 && message.contains("role") &&
               message.contains("content") && message["role"].is_string() && message["content"].is_string();
      if (!plain) break;
      v1::ChatMessage* to = render.mutable_chat()->add_messages();
      to->set_role(message["role"].get<std::string>());
      to->set_content(message["content"].get<std::string>());
    }
    if (!plain) continue;
    if (prompt.chat->enable_thinking)
      render.mutable_chat()->set_enable_thinking(*prompt.chat->enable_thinking);
    v1::RenderChatResponse rendered;
    if (const grpc::Status status = connection_.RenderChat(render, &rendered); !status.ok()) return status;
    ++chats;
    wrong_chats += rendered.text() != prompt.text;
  }
  if (texts > 0) {
    report_->Judge("tokenizer", static_cast<double>(wrong_texts), 0, "token ids in the bundle",
                   absl::StrCat(texts - wrong_texts, " of ", texts, " prompts are the same tokens"),
                   "tokenizer.json of another revision");
  }
  if (chats > 0) {
    report_->Judge("template", static_cast<double>(wrong_chats), 0, "texts in the bundle",
                   absl::StrCat(chats - wrong_chats, " of ", chats, " chats are rendered alike"),
                   "another chat template, or its thinking flag");
  }
  return grpc::Status::OK;
}

bool SameText(const Generation& generation, const GoldenPrompt& golden) {
  return std::equal(generation.token_ids.begin(), generation.token_ids.end(), golden.output_ids.begin(),
                    golden.output_ids.end());
}

void Examination::JudgeTexts(int64_t texts, int64_t other) {
  if (other == 0 && texts > 0) {
    report_->target_text = doctor::TargetText::kRecorded;
  } else if (other > 0 && activations() == DType::kF32) {
    report_->target_text = doctor::TargetText::kOther;  // of 16-bit activations near ties are one
  }
}

grpc::Status Examination::ReadTexts(int64_t max_prompts) {
  constexpr int64_t kTexts = 4;
  int64_t texts = 0, other = 0;
  for (const GoldenPrompt& prompt : bundle_.prompts()) {
    if (texts >= std::min(max_prompts, kTexts)) break;
    if (!Fits(prompt)) continue;
    Generation answer;
    const grpc::Status status =
        Generate(GreedyRequest(prompt.prompt_ids, static_cast<int64_t>(prompt.output_ids.size()),
                               v1::SPECULATION_MODE_OFF),
                 &answer);
    if (!status.ok()) return status;
    ++texts;
    other += !SameText(answer, prompt);
  }
  JudgeTexts(texts, other);
  return grpc::Status::OK;
}

void Examination::CheckAcceptance() {
  doctor::RecordedAcceptance recorded, of_same_text;
  BlockCuts cuts(model_.drafter().block_size());
  int64_t prompts_cut = 0;
  int64_t other_text = 0, miscounted = 0;
  double accepted = 0, rounds = 0, first = 0;
  for (size_t i = 0; i < alone_.size(); ++i) {
    const GoldenPrompt& golden = bundle_.prompts()[prompts_[i]];
    const Generation& generation = alone_[i];
    const bool same_text = SameText(generation, golden);
    other_text += !same_text;
    uint64_t of_rounds = 0, drafted = 0;
    for (const v1::StepInfo& round : generation.rounds) {
      of_rounds += round.accepted();
      drafted += round.drafted();
      first += round.accepted() > 0;
    }
    accepted += static_cast<double>(of_rounds);
    rounds += static_cast<double>(generation.rounds.size());
    const v1::SpeculationSummary& summary = generation.finished.speculation();
    miscounted += summary.accepted_tokens() != of_rounds || summary.drafted_tokens() != drafted;
    if (cuts.Add(generation, requests_[i].stopping().max_tokens())) {
      ++prompts_cut;
      continue;
    }
    const auto count = static_cast<int64_t>(generation.rounds.size());
    recorded.Add(golden, count, static_cast<int64_t>(of_rounds) + count);
    if (same_text) of_same_text.Add(golden, count, static_cast<int64_t>(of_rounds) + count);
  }
  JudgeTexts(static_cast<int64_t>(alone_.size()), other_text);
  const double limit = doctor::LargestAcceptanceLoss(activations());
  // Near ties of 16-bit activations: what counts is whether drafts are missing where the text is as recorded.
  if (other_text > 0 && activations() != DType::kF32 && of_same_text.loss() > limit)
    report_->target_text = doctor::TargetText::kRecorded;
  const std::string texts =
      other_text == 0 ? std::string() : absl::StrCat("; ", other_text, " prompts have another text");
  report_->facts.emplace_back(
      "acceptance",
      absl::StrFormat("%.2f tokens per round over %.0f rounds, first draft accepted in %.0f%%",
                      1 + accepted / std::max(rounds, 1.0), rounds, 100 * first / std::max(rounds, 1.0)));
  report_->Judge("metrics", static_cast<double>(miscounted), 0, "rounds of the stream against its summary",
                 absl::StrCat(miscounted, " of ", alone_.size(), " requests miscounted"),
                 "totals and rounds disagree");
  std::string left_out;
  if (cuts.any()) left_out = absl::StrCat("; ", prompts_cut, " prompts are not compared: ", cuts.Describe());
  if (recorded.empty()) {
    report_->NotChecked(
        "end-to-end",
        (cuts.any() ? cuts.Describe() : std::string("the bundle holds no acceptance lengths")) + texts);
    return;
  }
  if (!report_->Judge(
          "end-to-end", recorded.loss(), limit, "recorded acceptance per kind of text, relative loss",
          absl::StrCat("tokens per round: ", recorded.Describe(), texts, left_out),
          "not visible from outside: run dflashctl doctor --model DIR --draft-model DIR on the server's "
          "folders")) {
    report_->Of("end-to-end").blame = doctor::Blame::kUnsettled;
  }
}

// What a round leaves in the drafter's context has to be what the same tokens leave as a prompt. So rounds
// behind rejected drafts are run again: as the first round of a request whose prompt ends where they began.
grpc::Status Examination::CheckContextUpdate() {
  constexpr size_t kRounds = 32, kLeastRounds = 8, kRoundsOfOne = 4;
  const auto block = static_cast<int64_t>(model_.drafter().block_size());
  if (report_->Of("prefix").outcome == doctor::Outcome::kFail) {
    report_->NotChecked("context-update", "the drafter's context is wrong before any round: see prefix");
    return grpc::Status::OK;
  }
  BlockCuts cuts(block);
  std::vector<RoundPair> rounds;
  for (size_t i = 0; i < alone_.size() && rounds.size() < kRounds; ++i) {
    const Generation& generation = alone_[i];
    const int64_t max_tokens = requests_[i].stopping().max_tokens();
    if (cuts.Add(generation, max_tokens)) continue;
    std::vector<v1::StepInfo> behind;  // and with room for a whole block
    bool rejected = false;
    for (const v1::StepInfo& round : generation.rounds) {
      const int64_t first = round.first_token_offset();
      if (rejected && first > 0 && max_tokens - first >= block) behind.push_back(round);
      rejected |= round.accepted() < round.drafted();
    }
    if (behind.size() > kRoundsOfOne) behind.erase(behind.begin(), behind.end() - kRoundsOfOne);
    for (const v1::StepInfo& round : behind) {
      const size_t anchor = round.first_token_offset() - 1;  // of the output, it comes from prefill then
      std::vector<uint32_t> tokens(requests_[i].tokens().ids().begin(), requests_[i].tokens().ids().end());
      tokens.insert(tokens.end(), generation.token_ids.begin(),
                    generation.token_ids.begin() + static_cast<int64_t>(anchor));
      v1::GenerateRequest request = GreedyRequest(tokens, block + 1, v1::SPECULATION_MODE_DFLASH);
      request.mutable_scheduling()->set_no_prefix_cache(true);
      Generation answer;
      if (const grpc::Status status = Generate(request, &answer); !status.ok()) return status;
      if (cuts.Add(answer, block + 1) || answer.rounds.empty() ||
          answer.token_ids[0] != generation.token_ids[anchor]) {
        continue;
      }
      rounds.push_back({.ours = static_cast<double>(round.accepted()),
                        .theirs = static_cast<double>(answer.rounds[0].accepted())});
    }
  }
  double in_run = 0, as_prompt = 0;
  for (const RoundPair& round : rounds) in_run += round.ours, as_prompt += round.theirs;
  const AcceptanceLoss loss = CompareRounds(rounds);
  const std::string detail = absl::StrFormat(
      "%d rounds behind rejected drafts: %.0f drafts accepted, %.0f with the same tokens as a prompt",
      rounds.size(), in_run, as_prompt);
  if (rounds.size() < kLeastRounds || !loss.tells) {
    report_->NotChecked("context-update", cuts.any() ? cuts.Describe() : "too little to compare: " + detail);
  } else {
    report_->Judge(
        "context-update", loss.loss, loss.limit,
        "the same tokens as a prompt, relative loss of accepted drafts", detail,
        "rows of rejected drafts stay in the drafter's context, or accepted ones are stored at other "
        "positions than their own");
  }
  return grpc::Status::OK;
}

// A prompt of whole pages, twice.
grpc::Status Examination::CheckPrefix() {
  constexpr size_t kTokens = 200, kOutput = 32;
  std::vector<int32_t> tokens;
  for (size_t i = 0; tokens.size() < kTokens; i = (i + 1) % prompts_.size()) {
    const std::vector<int32_t>& ids = bundle_.prompts()[prompts_[i]].prompt_ids;
    tokens.insert(tokens.end(), ids.begin(), ids.end());
  }
  tokens.resize(std::min<size_t>(
      kTokens, model_.max_context_tokens() - std::min<size_t>(model_.max_context_tokens(), kOutput)));
  v1::GenerateRequest request = GreedyRequest(tokens, kOutput, v1::SPECULATION_MODE_DFLASH);
  request.mutable_stopping()->set_ignore_eos(true);
  Generation cold, again;
  for (Generation* answer : {&cold, &again}) {
    if (const grpc::Status status = Generate(request, answer); !status.ok()) return status;
  }
  const std::string detail = absl::StrFormat(
      "%.2f tokens per round before, %.2f again; %d of %d prompt tokens came from a cache. Not tried: a "
      "prompt that only "
      "begins alike, and one again after it was evicted",
      TokensPerRound(cold), TokensPerRound(again), again.finished.usage().cached_tokens(),
      again.finished.usage().prompt_tokens());
  BlockCuts cuts(model_.drafter().block_size());
  for (const Generation* answer : {&cold, &again}) cuts.Add(*answer, kOutput);
  const bool same_text = cold.token_ids == again.token_ids;
  const bool same = same_text && (cuts.any() || Accepted(cold) == Accepted(again));
  if (same && again.finished.usage().cached_tokens() == 0) {
    report_->NotChecked("prefix", "the server's prefix cache was not reached: " + detail);
  } else if (same && cuts.any()) {
    report_->NotChecked("prefix", absl::StrCat("the text is the same, accepted drafts are not compared: ",
                                               cuts.Describe(), "; ", detail));
  } else {
    report_->Judge("prefix", same ? 0 : 1, 0, "the same prompt before", detail,
                   "the restored prefix has no drafter context, or another request's");
  }
  return grpc::Status::OK;
}

grpc::Status Examination::CheckText(int64_t max_prompts) {
  size_t too_long = 0;
  for (size_t i = 0; i < bundle_.prompts().size() && static_cast<int64_t>(prompts_.size()) < max_prompts;
       ++i) {
    const GoldenPrompt& prompt = bundle_.prompts()[i];
    if (Fits(prompt)) {
      prompts_.push_back(i);
    } else {
      ++too_long;
    }
  }
  if (too_long > 0) {
    report_->facts.emplace_back("left out",
                                absl::StrCat(too_long,
                                             " golden prompts, with their outputs longer than the "
                                             "server's context of ",
                                             model_.max_context_tokens()));
  }
  if (prompts_.empty()) return grpc::Status::OK;  // all of it stays unchecked
  const auto count = static_cast<int64_t>(prompts_.size());
  for (const size_t i : prompts_) {
    const GoldenPrompt& prompt = bundle_.prompts()[i];
    requests_.push_back(GreedyRequest(prompt.prompt_ids, static_cast<int64_t>(prompt.output_ids.size()),
                                      v1::SPECULATION_MODE_DFLASH));
  }
  // One at a time: rounds of many sequences may be given shorter blocks.
  alone_.resize(requests_.size());
  for (size_t i = 0; i < requests_.size(); ++i) {
    if (const grpc::Status status = Generate(requests_[i], &alone_[i]); !status.ok()) return status;
  }
  CheckAcceptance();

  std::vector<Generation> together;
  const std::vector<v1::GenerateRequest> few(requests_.begin(),
                                             requests_.begin() + std::min<int64_t>(count, 4));
  if (const grpc::Status status = GenerateAll(few, &together); !status.ok()) return status;
  int64_t different = 0;
  for (size_t i = 0; i < together.size(); ++i) different += together[i].token_ids != alone_[i].token_ids;
  report_->Judge("batching", static_cast<double>(different), 0, "the same prompts one at a time",
                 absl::StrCat(different, " of ", together.size(), " texts differ when they run together"),
                 "a sequence reads another's rows");

  if (const grpc::Status status = CheckPrefix(); !status.ok()) return status;

  std::vector<v1::GenerateRequest> sampled = {requests_[0], requests_[0]};
  for (v1::GenerateRequest& request : sampled) {
    request.mutable_sampling()->set_temperature(0.7f);
    request.mutable_sampling()->set_top_p(0.9f);
    request.mutable_sampling()->set_seed(20);
  }
  sampled[1].mutable_speculation()->set_mode(v1::SPECULATION_MODE_OFF);
  std::vector<Generation> texts;
  if (const grpc::Status status = GenerateAll(sampled, &texts); !status.ok()) return status;
  report_->Judge("sampling", texts[0].token_ids == texts[1].token_ids ? 0 : 1, 0,
                 "the same seed without drafts",
                 absl::StrCat(texts[0].token_ids.size(), " tokens at temperature 0.7"),
                 "drafts change the sampled text");

  const auto block = static_cast<int64_t>(model_.drafter().block_size());
  std::vector<v1::GenerateRequest> limited;
  for (int64_t tokens = 1; tokens <= block + 1; ++tokens) {
    limited.push_back(
        GreedyRequest(bundle_.prompts()[prompts_[0]].prompt_ids, tokens, v1::SPECULATION_MODE_DFLASH));
    limited.back().mutable_stopping()->set_ignore_eos(true);
  }
  limited.push_back(limited.back());
  limited.back().mutable_speculation()->set_mode(v1::SPECULATION_MODE_OFF);
  if (const grpc::Status status = GenerateAll(limited, &texts); !status.ok()) return status;
  int64_t cut = 0;
  for (int64_t tokens = 1; tokens <= block + 1; ++tokens) {
    const std::vector<uint32_t>& ids = texts[static_cast<size_t>(tokens - 1)].token_ids;
    cut += static_cast<int64_t>(ids.size()) != tokens ||
           !std::equal(ids.begin(), ids.end(), texts.back().token_ids.begin());
  }
  report_->Judge("limits", static_cast<double>(cut), 0, "the same text without drafts",
                 absl::StrCat(cut, " of ", block + 1,
                              " token limits change the text. Not tried: a stop inside an accepted run"),
                 "rows beyond the limit are emitted");
  return grpc::Status::OK;
}

grpc::Status Examination::Run(int64_t max_prompts) {
  const absl::Time start = absl::Now();
  if (const grpc::Status status = CheckIdentity(); !status.ok()) return status;
  if (report_->verdict().kind == doctor::VerdictKind::kBadInput) return grpc::Status::OK;
  v1::GetDiagnosisResponse before, after;
  if (admin_ != nullptr) {
    if (const grpc::Status status = GetDiagnosis(connection_, *admin_, &before); !status.ok()) return status;
  }
  if (const grpc::Status status = CheckPrompts(); !status.ok()) return status;
  const grpc::Status texts = model_.has_drafter() ? CheckText(max_prompts) : ReadTexts(max_prompts);
  if (!texts.ok()) return texts;
  if (admin_ != nullptr) {
    if (const grpc::Status status = AwaitDiagnosis(before, &after); !status.ok()) return status;
    ExamineDiagnosis(before, after, own_rounds_, bundle_, report_);
  }
  if (!alone_.empty()) {
    if (const grpc::Status status = CheckContextUpdate(); !status.ok()) return status;
  }
  report_->Settle();
  report_->seconds = absl::ToDoubleSeconds(absl::Now() - start);
  return grpc::Status::OK;
}

}  // namespace

std::string ContractDifferences(const std::string& line, const golden::ExpectedContract& expected) {
  FeatureContract contract;
  for (const int32_t tap : expected.taps) contract.taps.push_back(LayerIndex{tap});
  contract.mask_token_id = expected.mask_token_id;
  contract.block_size = expected.block_size;
  contract.layers = expected.layers;
  contract.rope_theta = expected.rope_theta;
  contract.rotary_fraction = expected.rotary_fraction;
  contract.rms_norm_eps = expected.rms_norm_eps;
  const std::map<std::string, std::string> ours = Fields(line), theirs = Fields(contract.ToLine());
  std::vector<std::string> differences;
  for (const auto& [key, value] : theirs) {
    const auto found = ours.find(key);
    const std::string own = found == ours.end() ? "nothing" : found->second;
    if (own != value) differences.push_back(absl::StrCat(key, "=", own, " instead of ", key, "=", value));
  }
  return absl::StrJoin(differences, "; ");
}

grpc::Status ExamineServer(Connection& connection, const Endpoint* admin, const GoldenBundle& bundle,
                           int64_t max_prompts, Report* report) {
  return Examination(connection, admin, bundle, report).Run(max_prompts);
}

namespace {

// Fails an interface, also one that something else has passed. Null: it has failed already.
doctor::Finding* FailAnyway(Report* report, const char* id, const std::string& detail,
                            const std::string& cause, doctor::Blame blame = doctor::Blame::kIntegration) {
  doctor::Finding& finding = report->Of(id);
  if (finding.outcome == doctor::Outcome::kFail) return nullptr;
  report->Fail(id, detail, cause, blame);
  return &finding;
}

// One group that has other weights than recorded is enough.
void CheckRevisions(const v1::GroupDiagnosis& group, const GoldenBundle& bundle, Report* report) {
  if (report->Of("revisions").outcome == doctor::Outcome::kFail) return;
  doctor::TensorDigests target, drafter;
  for (const auto& [name, digest] : group.fingerprints()) {
    for (const auto& [prefix, map] :
         {std::pair("target ", &target.samples), std::pair("drafter ", &drafter.samples),
          std::pair("whole drafter ", &drafter.whole)}) {
      if (name.starts_with(prefix)) map->emplace(name.substr(std::string_view(prefix).size()), digest);
    }
  }
  JudgeRevisions(doctor::CompareWeights(target, {bundle.target_weights(), bundle.target_digests()}),
                 doctor::CompareWeights(drafter, {bundle.drafter_weights(), bundle.drafter_digests()}),
                 report);
}

// How often the server's counters contradict each other.
int64_t Contradictions(const v1::GroupDiagnosis& group) {
  uint64_t drafted = 0, accepted = 0, by_content = 0, by_origin = 0, in_bins = 0;
  for (const v1::PositionCounts& position : group.positions()) {
    drafted += position.drafted();
    accepted += position.accepted();
  }
  for (const v1::RoundCounts& counts : group.contents()) by_content += counts.rounds();
  for (const v1::RoundCounts& counts : group.origins()) by_origin += counts.rounds();
  for (const v1::ConfidenceCounts& counts : group.confidences()) in_bins += counts.accepted();
  return int64_t{drafted != group.drafted_tokens()} + int64_t{accepted != group.accepted_tokens()} +
         int64_t{by_content != group.rounds()} + int64_t{by_origin != group.rounds()} +
         int64_t{in_bins > group.accepted_tokens()};  // rounds under rules of requests are in no bin
}

std::string Causes(const std::string& reason) {
  if (reason == "no_opinion")
    return "the drafter's head is zero or not the target's: all tokens are equally probable";
  if (reason == "prefix_hits_differ") return "what the prefix cache restores is not what the drafter had";
  if (reason == "cliff_at_position") return "a mask, a window or a row of the block";
  return "the drafter is confident and rejected: it does not see what it was trained on";
}

}  // namespace

DType ActivationsOf(std::string_view backend) { return backend == "cpu" ? DType::kF32 : DType::kBf16; }

grpc::Status GetDiagnosis(const Connection& connection, const Endpoint& admin,
                          v1::GetDiagnosisResponse* diagnosis) {
  grpc::ClientContext context;
  admin.Prepare(&context);
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(10)));
  const Interrupt::Scope scope(connection.interrupt(), &context);
  const grpc::Status status = v1::AdminService::NewStub(admin.Dial())->GetDiagnosis(&context, {}, diagnosis);
  if (status.ok()) return status;
  return grpc::Status(status.error_code(),
                      absl::StrCat("the operators' port ", admin.address, ": ", status.error_message()));
}

void ExamineDiagnosis(const v1::GetDiagnosisResponse& before, const v1::GetDiagnosisResponse& after,
                      uint64_t own_rounds, const GoldenBundle& bundle, Report* report) {
  int64_t contradictions = 0, loaded = 0;
  uint64_t context = 0, missing = 0;
  std::vector<std::string> contracts;
  for (const v1::GroupDiagnosis& group : after.groups()) {
    if (group.feature_contract().empty()) continue;  // not ready, or without a drafter
    const v1::SpeculationHealth& health = group.health();
    if (health.self_test() == "failed") {
      report->Fail("end-to-end",
                   absl::StrCat("group ", group.name(),
                                " refuses to draft: its self-test failed: ", health.self_test_detail()),
                   "what its self-test found: " + health.self_test_detail(), doctor::Blame::kUnsettled);
    }
    report->facts.emplace_back(
        absl::StrCat("group ", group.name()),
        absl::StrFormat(
            "%s, %d ranks; %d rounds since its start; speculation %s%s; self-test %s%s", group.backend(),
            group.ranks(), group.rounds(), group.health().verdict(),
            group.health().reason() == "none" ? "" : " (" + group.health().reason() + ")",
            group.health().self_test(),
            group.health().self_test_detail().empty() ? "" : ": " + group.health().self_test_detail()));
    CheckRevisions(group, bundle, report);
    const std::string differences = ContractDifferences(group.feature_contract(), bundle.contract());
    if (!differences.empty()) contracts.push_back(absl::StrCat("group ", group.name(), ": ", differences));
    ++loaded;
    contradictions += Contradictions(group);
    context += group.context_tokens();
    missing += group.context_missing_tokens();
  }
  if (loaded == 0) return;
  report->Pass("files", 0, 0, "the running groups",
               "every tensor that the configurations call for was found when the groups loaded");
  report->Judge("config", static_cast<double>(contracts.size()), 0,
                "the feature contracts in force against the bundle",
                contracts.empty() ? std::string("every field of every group's contract agrees")
                                  : absl::StrJoin(contracts, "; "),
                "the server reads the drafter otherwise than recorded: " + absl::StrJoin(contracts, "; "));
  if (context == 0) return;  // nobody has drafted
  // Coverage says nothing about what is in the context, so it can fail here but not pass.
  if (missing > 0) {
    const double share = static_cast<double>(missing) / static_cast<double>(context);
    if (doctor::Finding* finding = FailAnyway(
            report, "prefix",
            absl::StrFormat("%.1f%% of the positions before the anchors are not in the drafter's context",
                            100 * share),
            "the drafter's context does not begin where the sequence does: a prefix restored without it, or "
            "only the last chunk's taps")) {
      finding->measured = share;
      finding->limit = 0;
      finding->compared = "coverage 1: context of every position before an anchor";
    }
  }
  const uint64_t counted = Rounds(after) - Rounds(before);
  if (counted < own_rounds) ++contradictions;
  const bool streams_agree = report->Of("metrics").outcome == doctor::Outcome::kPass;
  if (contradictions > 0 || streams_agree) {
    report->Judge("metrics", static_cast<double>(contradictions), 0, "the server's counters, and the streams",
                  absl::StrFormat("%d contradictions; the server counted %d rounds, the streams had %d",
                                  contradictions, counted, own_rounds),
                  "acceptance is counted wrongly");
  }
  for (const v1::GroupDiagnosis& group : after.groups()) {
    const v1::SpeculationHealth& health = group.health();
    const std::string measured = absl::StrFormat(
        "first drafts: %.0f%% accepted where the drafter expected %.0f%%, last %d rounds",
        100 * health.first_draft_acceptance(), 100 * health.first_draft_confidence(), health.rounds());
    if (health.verdict() == "unknown") {
      if (report->Of("calibration").outcome == doctor::Outcome::kNotChecked) {
        report->NotChecked("calibration", absl::StrCat("group ", group.name(), ": ", health.reason(), ": ",
                                                       health.rounds(), " of different contexts"));
      }
      continue;
    }
    const double gap = health.first_draft_confidence() - health.first_draft_acceptance();
    if (health.verdict() == "broken" && health.reason() != "context_missing") {
      // Weights make no difference between a cached prefix and another.
      const bool no_opinion = health.reason() == "no_opinion";
      doctor::Finding* finding = FailAnyway(
          report, no_opinion ? "head" : "calibration",
          absl::StrCat("group ", group.name(), ": ", health.reason(), "; ", measured),
          Causes(health.reason()),
          health.reason() == "prefix_hits_differ" ? doctor::Blame::kIntegration : doctor::Blame::kUnsettled);
      if (finding != nullptr && !no_opinion) {
        finding->look_at =
            "What fails above. Where nothing does: dflashctl doctor --model DIR --draft-model DIR --golden "
            "DIR on the server's folders, which sees taps, masks, windows and positions; on a dashboard the "
            "acceptance by position, content and origin of the context.";
      }
    } else if (report->Of("calibration").outcome != doctor::Outcome::kFail) {
      report->Pass("calibration", gap, std::numeric_limits<double>::quiet_NaN(),
                   "the drafter's own probabilities", absl::StrCat(health.verdict(), "; ", measured));
    }
  }
}

}  // namespace dflash::ctl
