#include "tools/doctor/report.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "nlohmann/json.hpp"

namespace dflash::doctor {
namespace {

constexpr Interface kInterfaces[] = {
    {"files", "2", "files", Oracle::kLiteral,
     "A checkpoint is incomplete, or is not what its configuration says.",
     "The folders given as --model and --draft-model: config.json, *.safetensors, the index."},
    {"weights", "2", "weights are numbers", Oracle::kLiteral,
     "Weights are NaN or infinite: nothing that is computed from them says anything.",
     "The conversion or training that wrote the checkpoint; a damaged file."},
    {"revisions", "2", "weight revisions", Oracle::kBundle,
     "The weights are not those that the bundle was recorded with: the pair was never measured.",
     "Which revisions were downloaded; publishers replace weights in place."},
    {"config", "3", "config reading", Oracle::kBundle,
     "A key of the drafter's configuration was edited, lost or read otherwise than where the bundle was "
     "made.",
     "config.json of the drafter; docs/config-keys.md; worker/model/draft_config.cc."},
    {"tokenizer", "1", "tokenizer", Oracle::kBundle,
     "The prompt reaches the model as other tokens than in training.",
     "tokenizer.json of the target; text/tokenizer.cc."},
    {"template", "1", "chat template and thinking flag", Oracle::kBundle,
     "The conversation is rendered otherwise than in training; a drafter trained without thinking drafts "
     "badly with it.",
     "chat_template.jinja; enable_thinking of the request (ChatPrompt) and its default."},
    {"target", "-", "hidden states of the target", Oracle::kBundle,
     "The target itself computes something else: every interface behind it is fed with wrong numbers.",
     "config.json of the target; worker/model/target.cc; quantization of the target."},
    {"tap-layer", "4", "tap layer index", Oracle::kBundle,
     "The drafter sees the outputs of other layers than those it was trained on.",
     "dflash_config.target_layer_ids; OutputOf() in base/layer_index.h: id k is the output of layer k, "
     "hidden state k + 1."},
    {"tap-point", "5", "tap point", Oracle::kOwnPath,
     "A tap is not the finished residual: taken before the sum over ranks, before the residual is added, or "
     "after a norm.",
     "Target::Impl::PublishHiddenState in worker/model/target.cc."},
    {"tap-alignment", "6", "tap token alignment", Oracle::kSelf,
     "Taps of a row belong to another token than the row's.",
     "Rows handed to Drafter::Ingest; chunking of prompts in worker/engine/engine.cc."},
    {"tap-order", "7", "order of concatenation", Oracle::kBundle,
     "Taps are gathered in another order than the list's: shapes fit, features are noise.",
     "Order of target_layer_ids; column blocks of the taps in worker/model/target.cc."},
    {"fusion", "8", "projection, then norm with plain weight", Oracle::kOwnPath,
     "Context features c = norm(fc taps) are wrong.",
     "DFlashDrafter::Impl::IngestRows; NormWeight of the drafter (plain) and of the target (1 + w)."},
    {"injection", "9 10 11", "keys and values of the context", Oracle::kOwnPath,
     "A layer's context does not come from c through its own k_proj, k_norm and v_proj alone.",
     "DFlashDrafter::Impl::IngestRows in worker/draft/dflash_drafter.cc."},
    {"rope", "12", "RoPE of the context", Oracle::kBundle,
     "Keys are rotated otherwise than in training: near tokens look right, far ones do not.",
     "rope_theta (in rope_parameters first, then top level); partial_rotary_factor is the target's only."},
    {"embedding", "16", "anchor and mask embedding", Oracle::kBundle,
     "The block is not [anchor, mask, ..., mask] in the target's embedding.",
     "dflash_config.mask_token_id; MakeDraftBlocks in kernels/round."},
    {"masks", "13", "causality of the block, per layer", Oracle::kBundle,
     "A layer looks ahead in the block where it was trained not to, or cannot where it was.",
     "layer_types and is_causal; worker/model/draft_config.cc; FeatureContract::layers."},
    {"window", "14", "window edge, per layer", Oracle::kBundle,
     "A sliding layer sees more or less context than in training. Prompts shorter than the window hide it.",
     "sliding_window, use_sliding_window, layer_types; FeatureContract::layers."},
    {"paging", "15", "pages of a long context", Oracle::kOwnPath,
     "Keys and values of a long prompt are overwritten or recycled.",
     "SequenceTable, StoreKeyValue; the life of drafter pages."},
    {"draft-layers", "11", "the block through the layers", Oracle::kOwnPath,
     "A drafter layer computes something else: projections, feed-forward or the final norm.",
     "DFlashDrafter::Impl::RunLayer in worker/draft/dflash_drafter.cc."},
    {"head", "18", "shared head and vocabulary", Oracle::kOwnPath,
     "Draft logits do not come from the target's head: acceptance is nothing.",
     "Target::Head and Target::ChooseDrafts; lm_head of wrapped checkpoints; vocabulary limit."},
    {"mask-token", "31", "the mask token as a draft", Oracle::kLiteral,
     "The mask id is an ordinary token, but it is stripped when it is drafted.",
     "Filters of special tokens between the drafter and verification."},
    {"draft-rows", "17", "row j drafts position s + j", Oracle::kOwnPath,
     "Proposals are shifted by a row: all of them are compared with the wrong token.",
     "DFlashDrafter::Impl::Propose: rows 1 .. B - 1 go through the head."},
    {"positions", "12 17", "positions of the block's rows", Oracle::kBundle,
     "Block row j is not rotated to position s + j.",
     "Segments of MakeDraftBlocks in kernels/round; NormAndRope."},
    {"block-size", "19", "block size and number of drafts", Oracle::kBundle,
     "A block of B rows has B - 1 drafts; one more or less changes every proposal.",
     "block_size; max_draft_tokens of requests counts drafts, not rows."},
    {"verify-rows", "20", "verify rows against single steps", Oracle::kSelf,
     "Verification judges drafts by other logits than plain decoding has.",
     "Phase::kVerify in worker/model/target.cc; delta records of Gated DeltaNet."},
    {"acceptance", "21", "acceptance accounting", Oracle::kLiteral,
     "Accepted drafts, emitted tokens or the new anchor are miscounted.",
     "AcceptRows in kernels/round; DecodeRounds::Collect."},
    {"context-update", "22", "context update after verify", Oracle::kSelf,
     "After a round the drafter's context is not that of the accepted tokens at their own positions.",
     "Drafter::IngestVerified: row counts are the accepted rows, positions begin at the old anchor."},
    {"rollback", "23", "rollback of the target", Oracle::kSelf,
     "Rejected rows leave something behind in keys, convolution or recurrent state.",
     "Target::CommitVerified; pending delta records."},
    {"chunked-prefill", "24", "chunked prefill", Oracle::kSelf,
     "A prompt in pieces gives another drafter context than the prompt in one piece.",
     "Drafter::Ingest of every chunk, not of the last one only."},
    {"prefix", "25", "prefix hits and coverage", Oracle::kSelf,
     "The drafter's context does not cover the prompt: what a prefix cache restores must hold drafter keys "
     "too.",
     "draft_context_start of SequenceTable; the prefix cache."},
    {"next-token", "26", "no dependence on the next token", Oracle::kSelf,
     "Context of a position depends on the token after it, so shared prefixes could not be reused.",
     "Inputs of DFlashDrafter::Impl::IngestRows."},
    {"preemption", "27", "preemption and forks", Oracle::kSelf,
     "A resumed request has another context than an uninterrupted one.", "worker/engine."},
    {"batching", "28", "batching", Oracle::kSelf, "A sequence drafts otherwise in company than alone.",
     "Segments and rows of DFlashDrafter::Impl::Propose."},
    {"ranks", "32", "agreement of ranks", Oracle::kSelf,
     "Ranks disagree on tokens: the group will hang or lie.",
     "worker/rank; ShardedSampler; the communicator's order of sums."},
    {"sampling", "29", "sampled text with and without drafts", Oracle::kSelf,
     "Drafts change the sampled text.", "Noise keyed by position (kernels/sampling); AcceptRows."},
    {"draft-temperature", "30", "drafts ignore the temperature", Oracle::kSelf,
     "Drafts are sampled: independent positions contradict each other and acceptance falls.",
     "DFlashDrafter::Impl::Propose takes the best token of every row."},
    {"limits", "31", "token limits", Oracle::kSelf,
     "A block near the end of a request changes what is emitted.", "MakeVerifyRows: room cuts rows."},
    {"dtype", "33", "precision of the drafter", Oracle::kOwnPath,
     "Rounding or quantization changes too many of the drafter's choices.",
     "Dtype of drafter weights and activations."},
    {"metrics", "34", "counters", Oracle::kLiteral,
     "Acceptance is counted wrongly: the dashboard cannot be trusted.",
     "FinishedReport; worker/rpc/engine_metrics.cc."},
    {"calibration", "-", "confidence against acceptance", Oracle::kLiteral,
     "The drafter is sure of drafts that are rejected: it does not see what it was trained on. On hard text "
     "it would be unsure.",
     "What failed or was not checked above; on a dashboard the acceptance by position, content and origin of "
     "the context."},
    {"draft-logits", "35", "draft logits of the first block", Oracle::kBundle,
     "All interfaces hold one by one, yet the whole block differs from the reference.",
     "The findings above with the largest measured numbers."},
    {"end-to-end", "35", "tokens per round", Oracle::kBundle,
     "Fewer drafts are accepted than with the reference.",
     "If everything above passes, the drafter: its weights, its training, the kind of text."},
};

struct Style {
  const char* colour;
  const char* mark;
};
Style StyleOf(const Finding& finding) {
  switch (finding.outcome) {
    case Outcome::kPass:
      return {"\033[32m", "pass"};
    case Outcome::kFail:
      switch (finding.blame) {
        case Blame::kModel:
          return {"\033[35m", "FAIL (model)"};
        case Blame::kEither:
          return {"\033[35m", "FAIL (either)"};
        case Blame::kInput:
          return {"\033[31m", "FAIL (input)"};
        case Blame::kIntegration:
        case Blame::kUnsettled:
          return {"\033[31m", "FAIL"};
      }
      break;
    case Outcome::kSkipped:
      return {"\033[2m", "skipped"};
    case Outcome::kNotChecked:
      return {"\033[33m", "not checked"};
  }
  return {"", "?"};
}

std::string LookAt(const Finding& finding) {
  return finding.look_at.empty() ? finding.interface->look_at : finding.look_at;
}

constexpr size_t kWidth = 106;  // columns of the text

// Breaks at spaces, so that no line is longer than kWidth where words allow it. `used` columns of the first
// line are taken; later lines begin with `indent`.
std::string Wrapped(const std::string& text, size_t used, const std::string& indent) {
  std::string out, line;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(' ', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    if (!line.empty() && used + line.size() + 1 + word.size() > kWidth) {
      absl::StrAppend(&out, line, "\n", indent);
      used = indent.size();
      line.clear();
    }
    absl::StrAppend(&line, line.empty() ? "" : " ", word);
    begin = end + 1;
  }
  return out + line;
}

std::string Number(double value) {
  if (std::isinf(value)) return "no number";
  return absl::StrFormat("%.3g", value);
}

}  // namespace

std::span<const Interface> Interfaces() { return kInterfaces; }

const char* Name(Outcome outcome) {
  switch (outcome) {
    case Outcome::kPass:
      return "pass";
    case Outcome::kFail:
      return "fail";
    case Outcome::kSkipped:
      return "skipped";
    case Outcome::kNotChecked:
      return "not checked";
  }
  return "?";
}

const char* Name(Oracle oracle) {
  switch (oracle) {
    case Oracle::kOwnPath:
      return "own double-precision path";
    case Oracle::kBundle:
      return "golden bundle";
    case Oracle::kLiteral:
      return "literal";
    case Oracle::kSelf:
      return "itself, run another way";
  }
  return "?";
}

const char* Name(VerdictKind kind) {
  switch (kind) {
    case VerdictKind::kHealthy:
      return "healthy";
    case VerdictKind::kIncomplete:
      return "incomplete";
    case VerdictKind::kModel:
      return "model problem";
    case VerdictKind::kIntegration:
      return "integration problem";
    case VerdictKind::kEither:
      return "integration or model problem";
    case VerdictKind::kBadInput:
      return "bad input";
  }
  return "?";
}

const char* Name(Blame blame) {
  switch (blame) {
    case Blame::kIntegration:
    case Blame::kUnsettled:
      return "integration";
    case Blame::kModel:
      return "model";
    case Blame::kEither:
      return "integration or model";
    case Blame::kInput:
      return "input";
  }
  return "?";
}

Report::Report() {
  for (const Interface& interface : kInterfaces) {
    findings_.emplace_back();
    findings_.back().interface = &interface;
    findings_.back().detail = "not reached";
  }
}

Finding& Report::Of(std::string_view id) {
  const auto found = std::find_if(findings_.begin(), findings_.end(),
                                  [&](const Finding& finding) { return id == finding.interface->id; });
  DFLASH_CHECK(found != findings_.end(), std::string(id).c_str());
  return *found;
}
const Finding& Report::Of(std::string_view id) const { return const_cast<Report*>(this)->Of(id); }

Finding& Report::Anew(std::string_view id) {
  Finding& finding = Of(id);
  const Interface* interface = finding.interface;
  finding = Finding();
  finding.interface = interface;
  return finding;
}

void Report::Pass(std::string_view id, double measured, double limit, std::string compared,
                  std::string detail) {
  Finding& finding = Anew(id);
  finding.outcome = Outcome::kPass;
  finding.measured = measured;
  finding.limit = limit;
  finding.compared = std::move(compared);
  finding.detail = std::move(detail);
}

bool Report::Judge(std::string_view id, double measured, double limit, std::string compared,
                   std::string detail, std::string cause) {
  Pass(id, measured, limit, std::move(compared), std::move(detail));
  if (measured <= limit) return true;
  Finding& finding = Of(id);
  finding.outcome = Outcome::kFail;
  finding.cause = std::move(cause);
  return false;
}

void Report::Fail(std::string_view id, std::string detail, std::string cause, Blame blame) {
  Finding& finding = Anew(id);
  finding.outcome = Outcome::kFail;
  finding.blame = blame;
  finding.detail = std::move(detail);
  finding.cause = std::move(cause);
}

void Report::Skip(std::string_view id, std::string why) {
  Finding& finding = Anew(id);
  finding.outcome = Outcome::kSkipped;
  finding.detail = std::move(why);
}

void Report::NotChecked(std::string_view id, std::string why) {
  Finding& finding = Anew(id);
  finding.outcome = Outcome::kNotChecked;
  finding.detail = std::move(why);
}

void Report::FailInput(std::string_view id, const std::string& error, std::string where) {
  Fail(id, error, error, Blame::kInput);
  Of(id).look_at = std::move(where);
}

bool Report::EveryInterfaceAgrees() const {
  constexpr const char* kBetween[] = {"config",    "tap-layer", "tap-point",    "tap-alignment", "tap-order",
                                      "fusion",    "injection", "rope",         "embedding",     "masks",
                                      "window",    "paging",    "draft-layers", "head",          "draft-rows",
                                      "positions", "block-size"};
  return std::all_of(std::begin(kBetween), std::end(kBetween), [this](const char* id) {
    const Finding& finding = Of(id);
    return finding.outcome == Outcome::kPass || finding.outcome == Outcome::kSkipped ||
           (finding.outcome == Outcome::kFail && finding.blame == Blame::kUnsettled);
  });
}

void Report::Settle() {
  const bool agree = EveryInterfaceAgrees();
  const Outcome acceptance = Of("end-to-end").outcome;
  constexpr char kUnchecked[] = "not every interface was checked";
  constexpr char kUnsampled[] = "weights that were changed where no fingerprint samples them";
  bool target_broken = target_text == TargetText::kOther;
  bool follows = false;  // something above that failed
  for (Finding& finding : findings_) {
    follows |= finding.outcome == Outcome::kFail && finding.blame == Blame::kIntegration;
    if (finding.outcome != Outcome::kFail || finding.blame != Blame::kUnsettled) continue;
    const std::string_view id = finding.interface->id;
    const bool of_target = id == "target";
    const bool recorded_numbers = id == "fusion" || id == "draft-logits";
    const auto either = [&finding](std::string_view why) {
      finding.blame = Blame::kEither;
      if (!finding.cause.empty()) finding.cause += "; ";
      finding.cause += why;
    };
    const bool other =
        target_weights == Weights::kOther || (!of_target && drafter_weights == Weights::kOther);
    const bool compared =
        target_weights != Weights::kUnknown && (of_target || drafter_weights != Weights::kUnknown);
    const bool same_drafter = drafter_weights == Weights::kRecorded;
    const bool same_target = target_weights == Weights::kRecorded || target_text == TargetText::kRecorded;
    if (follows) {
      finding.blame = Blame::kIntegration;
      finding.cause = "the first failure above";
    } else if (other) {
      finding.blame = Blame::kModel;
      finding.cause =
          "weights that are not the recorded ones (random, of another revision, trained for another target "
          "or for other text): " +
          finding.detail;
    } else if (!compared) {
      either(absl::StrCat(agree ? "every interface agrees, which speaks for the weights" : kUnchecked,
                          "; the weights could not be compared with recorded ones"));
    } else if (of_target || target_broken) {
      target_broken = true;
      if (target_weights == Weights::kRecorded) {
        finding.blame = Blame::kIntegration;
      } else if (of_target) {
        either("only samples of the target's weights were compared");
      } else {
        either(
            absl::StrCat("the target itself computes something else than recorded: its configuration or "
                         "arithmetic, or ",
                         kUnsampled));
      }
    } else if (agree) {
      finding.blame = Blame::kModel;
      const bool sampled = target_weights == Weights::kSampled || drafter_weights == Weights::kSampled;
      if (id == "end-to-end") {
        finding.cause =
            absl::StrCat("every interface agrees with its oracle, yet the pair accepts less than recorded: ",
                         sampled ? absl::StrCat(kUnsampled, ", or ") : std::string(),
                         "what was recorded is the acceptance of another pair, or of other blocks");
      } else {
        finding.cause = absl::StrCat(
            "every interface agrees with its oracle, so it is the drafter: its training, this kind of text",
            sampled ? absl::StrCat(", or ", kUnsampled) : std::string());
      }
    } else if (acceptance == Outcome::kFail && same_target && same_drafter) {
      finding.blame = Blame::kIntegration;
    } else if (acceptance == Outcome::kFail) {
      either(absl::StrCat(kUnchecked, ", and only samples of the weights were compared"));
    } else if (acceptance == Outcome::kPass && !recorded_numbers) {
      finding.blame = Blame::kModel;
      finding.cause =
          "the recorded weights draft as they did when they were recorded, so it is the drafter: its "
          "training, or this kind of text";
    } else {
      either(absl::StrCat(kUnchecked, acceptance == Outcome::kPass
                                          ? ", though tokens per round are as recorded"
                                          : ", and no acceptance to compare with was recorded"));
    }
  }
}

bool Report::broken() const {
  return std::any_of(findings_.begin(), findings_.end(), [](const Finding& finding) {
    return finding.outcome == Outcome::kFail && finding.blame == Blame::kIntegration;
  });
}

const Verdict Report::verdict() const {
  Verdict verdict;
  std::vector<std::string> others;
  int64_t unchecked = 0;
  const Finding *first_model = nullptr, *first_either = nullptr, *first_input = nullptr;
  for (const Finding& finding : findings_) {
    unchecked += finding.outcome == Outcome::kNotChecked;
    if (finding.outcome != Outcome::kFail) continue;
    if (finding.blame == Blame::kModel) {
      if (first_model == nullptr) first_model = &finding;
    } else if (finding.blame == Blame::kEither) {
      if (first_either == nullptr) first_either = &finding;
    } else if (finding.blame == Blame::kInput) {
      if (first_input == nullptr) first_input = &finding;
    } else if (verdict.first_failure == nullptr) {
      verdict.first_failure = &finding;
    } else {
      others.emplace_back(finding.interface->id);
    }
  }
  if (first_input != nullptr) {
    const Finding* const first_other = verdict.first_failure != nullptr ? verdict.first_failure
                                       : first_model != nullptr         ? first_model
                                                                        : first_either;
    verdict.kind = VerdictKind::kBadInput;
    verdict.first_failure = first_input;
    std::vector<std::string> failing;
    int64_t passed = 0;
    for (const Finding& finding : findings_) {
      passed += finding.outcome == Outcome::kPass;
      if (finding.outcome == Outcome::kFail && &finding != first_input)
        failing.emplace_back(finding.interface->id);
    }
    verdict.text =
        absl::StrCat(passed == 0 ? std::string("Nothing was examined: ")
                                 : absl::StrCat("\"", first_input->interface->title, "\" (",
                                                first_input->interface->id, ") could not be examined: "),
                     first_input->cause, ". Look at: ", first_input->look_at, ".");
    if (passed > 0) {
      absl::StrAppend(&verdict.text, " Of the others ", passed, " pass, ",
                      failing.empty() ? "none" : absl::StrJoin(failing, ", "),
                      failing.size() == 1 ? " fails."
                      : failing.empty()   ? " fails."
                                          : " fail.");
    }
    if (first_other != nullptr) {
      absl::StrAppend(&verdict.text, " Found all the same at \"", first_other->interface->title, "\" (",
                      first_other->interface->id, ", ", Name(first_other->blame), "): ", first_other->cause,
                      ". Look at: ", LookAt(*first_other));
    }
    return verdict;
  }
  if (verdict.first_failure != nullptr) {
    const Finding& first = *verdict.first_failure;
    verdict.kind = VerdictKind::kIntegration;
    verdict.text =
        absl::StrCat("The integration is broken at \"", first.interface->title, "\" (", first.interface->id,
                     "). Most probable cause: ", first.cause, ". Look at: ", LookAt(first));
    if (!others.empty()) {
      absl::StrAppend(&verdict.text, " Also failing behind it: ", absl::StrJoin(others, ", "),
                      ". Mend the first one and run the doctor again.");
    }
    return verdict;
  }
  if (first_model != nullptr) {
    verdict.kind = VerdictKind::kModel;
    verdict.first_failure = first_model;
    verdict.text = absl::StrCat("No interface of the integration failed, so this is a problem of the model: ",
                                first_model->cause, " (", first_model->interface->id, ").");
    if (first_either != nullptr)
      absl::StrAppend(&verdict.text, " Not told by that: ", first_either->interface->id, ".");
  } else if (first_either != nullptr) {
    verdict.kind = VerdictKind::kEither;
    verdict.first_failure = first_either;
    verdict.text = absl::StrCat(
        "\"", first_either->interface->title, "\" (", first_either->interface->id,
        ") fails, and both are possible: ",
        target_weights == Weights::kUnknown || drafter_weights == Weights::kUnknown
            ? "other weights than those that were recorded (random, another revision, trained for another "
              "target)"
        : target_weights == Weights::kRecorded && drafter_weights == Weights::kRecorded
            ? "a bad drafter (its training)"
            : "a bad model (the drafter's training, weights of either that were changed where no fingerprint "
              "samples them)",
        ", or a broken integration: ", first_either->cause, ". What tells: ", what_tells, ".");
  } else if (unchecked > 0) {
    verdict.kind = VerdictKind::kIncomplete;
    verdict.text =
        absl::StrCat("Nothing failed, but ", unchecked,
                     unchecked == 1 ? " interface was" : " interfaces were", " not checked. ", advice);
  } else {
    verdict.kind = VerdictKind::kHealthy;
    verdict.text = "Every interface that applies agrees with its oracle.";
  }
  return verdict;
}

int Report::ExitCode() const {
  switch (verdict().kind) {
    case VerdictKind::kHealthy:
    case VerdictKind::kIncomplete:
      return 0;
    case VerdictKind::kModel:
      return 5;
    case VerdictKind::kIntegration:
      return 1;
    case VerdictKind::kEither:
      return 6;
    case VerdictKind::kBadInput:
      return 2;
  }
  return 1;
}

std::string Report::ToText(bool colours) const {
  const auto paint = [colours](const std::string& text, const char* colour) {
    return colours ? absl::StrCat(colour, text, "\033[0m") : text;
  };
  constexpr char kBold[] = "\033[1m";
  std::string text;
  for (const auto& [name, value] : facts) {
    const std::string label = absl::StrFormat("%-12s ", name);
    absl::StrAppend(&text, label, Wrapped(value, label.size(), std::string(label.size(), ' ')), "\n");
  }
  absl::StrAppendFormat(&text, "\n%-7s %-39s %-13s %-9s %-8s %s\n", "no.", "interface", "result", "measured",
                        "limit", "oracle");
  for (const Finding& finding : findings_) {
    const Style style = StyleOf(finding);
    const bool number = !std::isnan(finding.measured);
    absl::StrAppendFormat(&text, "%-7s %-39s %s %-9s %-8s %s\n", finding.interface->numbers,
                          finding.interface->title, paint(absl::StrFormat("%-13s", style.mark), style.colour),
                          number ? Number(finding.measured) : "",
                          std::isnan(finding.limit) ? "" : Number(finding.limit), Name(finding.oracle()));
    if (finding.outcome == Outcome::kPass) continue;
    const std::string indent(8, ' ');
    const auto line = [&](const char* label, const std::string& words) {
      if (words.empty()) return;
      const std::string behind = indent + std::string(std::string_view(label).size(), ' ');
      absl::StrAppend(&text, indent, label, Wrapped(words, behind.size(), behind), "\n");
    };
    if (finding.outcome != Outcome::kFail) {
      line("", finding.detail);
      continue;
    }
    line("seen:     ", finding.detail);
    line("against:  ", finding.compared);
    line("cause:    ", finding.cause);
    line("means:    ", std::string(finding.interface->meaning));
    line("look at:  ", LookAt(finding));
  }
  int64_t counts[4] = {0, 0, 0, 0};
  for (const Finding& finding : findings_) ++counts[static_cast<size_t>(finding.outcome)];
  absl::StrAppendFormat(&text, "\n%d pass, %d fail, %d skipped, %d not checked; %.1f s\n", counts[0],
                        counts[1], counts[2], counts[3], seconds);
  const Verdict verdict = this->verdict();
  const std::string heading = absl::StrCat("Verdict: ", Name(verdict.kind), ".");
  absl::StrAppend(&text, paint(heading, kBold), " ", Wrapped(verdict.text, heading.size() + 1, ""), "\n");
  return text;
}

std::string Report::ToJson() const {
  using Json = nlohmann::ordered_json;
  const auto number = [](double value) -> Json { return std::isfinite(value) ? Json(value) : Json(nullptr); };
  Json root;
  for (const auto& [name, value] : facts) root["facts"][name] = value;
  root["interfaces"] = Json::array();
  for (const Finding& finding : findings_) {
    const Interface& interface = *finding.interface;
    Json entry = {{"id", interface.id},
                  {"numbers", interface.numbers},
                  {"title", interface.title},
                  {"oracle", Name(finding.oracle())},
                  {"outcome", Name(finding.outcome)},
                  {"measured", number(finding.measured)},
                  {"limit", number(finding.limit)},
                  {"compared_with", finding.compared},
                  {"detail", finding.detail}};
    if (finding.outcome == Outcome::kFail) {
      entry["blame"] = Name(finding.blame);
      entry["cause"] = finding.cause;
      entry["meaning"] = interface.meaning;
      entry["look_at"] = LookAt(finding);
    }
    root["interfaces"].push_back(std::move(entry));
  }
  const Verdict verdict = this->verdict();
  root["verdict"] = {{"kind", Name(verdict.kind)}, {"text", verdict.text}};
  if (verdict.first_failure != nullptr)
    root["verdict"]["first_failure"] = verdict.first_failure->interface->id;
  root["seconds"] = seconds;
  return root.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string ErrorJson(std::string_view error, int exit_code) {
  using Json = nlohmann::ordered_json;
  const Json root = {{"error", std::string(error)}, {"exit_code", exit_code}};
  return root.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace dflash::doctor
