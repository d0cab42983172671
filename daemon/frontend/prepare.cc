#include "daemon/frontend/prepare.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/sha256.h"
#include "base/status.h"
#include "daemon/request/request_error.h"
#include "text/grammar/json_grammar.h"

namespace dflash {
namespace {

// In [min, max], or 0 where that says "off" although it is below.
absl::Status CheckFloat(const std::optional<float>& value, const char* field, float min, float max,
                        bool zero_allowed = false) {
  if (!value.has_value() || (*value >= min && *value <= max) || (zero_allowed && *value == 0))
    return absl::OkStatus();
  // All digits of the value: 1.0000001 is not "1".
  return BadParameter(field, absl::StrFormat("must be %sfrom %g to %g, not %.9g", zero_allowed ? "0 or " : "",
                                             min, max, *value));
}

absl::Status CheckToken(uint32_t id, const std::string& field, int64_t vocabulary) {
  if (id < static_cast<uint64_t>(vocabulary)) return absl::OkStatus();
  return BadParameter(
      field, absl::StrCat("token id ", id, " is out of range: the vocabulary has ", vocabulary, " tokens"));
}

absl::Status CheckTokens(const std::vector<uint32_t>& ids, const std::string& field, int64_t vocabulary) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < static_cast<uint64_t>(vocabulary)) continue;
    return CheckToken(ids[i], absl::StrCat(field, "[", i, "]"), vocabulary);
  }
  return absl::OkStatus();
}

absl::Status CheckPrompt(const ClientRequest& request, const GroupInfo& info) {
  if (std::holds_alternative<std::monostate>(request.prompt)) {
    return BadParameter("prompt", "one of text, tokens and chat must be set");
  }
  if (const auto* text = std::get_if<TextPrompt>(&request.prompt)) {
    if (text->text.empty()) return BadParameter("text", "the prompt is empty");
  }
  if (const auto* tokens = std::get_if<TokenPrompt>(&request.prompt)) {
    if (tokens->ids.empty()) return BadParameter("tokens.ids", "the prompt is empty");
    DFLASH_RETURN_IF_ERROR(CheckTokens(tokens->ids, "tokens.ids", info.vocabulary_size));
  }
  if (const auto* chat = std::get_if<ChatPrompt>(&request.prompt)) {
    DFLASH_RETURN_IF_ERROR(CheckChat(*chat, "chat"));
  }
  return absl::OkStatus();
}

absl::Status CheckPenalties(const ClientRequest& request, const GroupInfo& info) {
  DFLASH_RETURN_IF_ERROR(CheckFloat(request.repetition_penalty, "sampling.repetition_penalty",
                                    RequestLimits::kMinRepetitionPenalty,
                                    RequestLimits::kMaxRepetitionPenalty));
  DFLASH_RETURN_IF_ERROR(CheckFloat(request.frequency_penalty, "sampling.frequency_penalty",
                                    -RequestLimits::kMaxPenalty, RequestLimits::kMaxPenalty));
  DFLASH_RETURN_IF_ERROR(CheckFloat(request.presence_penalty, "sampling.presence_penalty",
                                    -RequestLimits::kMaxPenalty, RequestLimits::kMaxPenalty));
  if (request.logit_bias.size() > RequestLimits::kMaxBiases) {
    return BadParameter("sampling.logit_bias", absl::StrCat("at most ", RequestLimits::kMaxBiases,
                                                            " are allowed, not ", request.logit_bias.size()));
  }
  std::set<uint32_t> seen;
  for (size_t i = 0; i < request.logit_bias.size(); ++i) {
    const ClientRequest::Bias& bias = request.logit_bias[i];
    const std::string field = absl::StrCat("sampling.logit_bias[", i, "]");
    DFLASH_RETURN_IF_ERROR(CheckToken(bias.token, absl::StrCat(field, ".token_id"), info.vocabulary_size));
    DFLASH_RETURN_IF_ERROR(CheckFloat(bias.bias, absl::StrCat(field, ".bias").c_str(),
                                      -RequestLimits::kMaxBias, RequestLimits::kMaxBias));
    if (!seen.insert(bias.token).second)
      return BadParameter(absl::StrCat(field, ".token_id"),
                          absl::StrCat("token ", bias.token, " comes twice"));
  }
  return absl::OkStatus();
}

absl::Status CheckBadWords(const ClientRequest& request, const GroupInfo& info) {
  if (request.bad_words.size() > RequestLimits::kMaxBadWords) {
    return BadParameter("stopping.bad_words", absl::StrCat("at most ", RequestLimits::kMaxBadWords,
                                                           " are allowed, not ", request.bad_words.size()));
  }
  for (size_t i = 0; i < request.bad_words.size(); ++i) {
    const std::string field = absl::StrCat("stopping.bad_words[", i, "].ids");
    const std::vector<uint32_t>& word = request.bad_words[i];
    if (word.empty() || word.size() > RequestLimits::kMaxBadWordTokens) {
      return BadParameter(field, absl::StrCat("must have 1 to ", RequestLimits::kMaxBadWordTokens,
                                              " tokens, not ", word.size()));
    }
    DFLASH_RETURN_IF_ERROR(CheckTokens(word, field, info.vocabulary_size));
  }
  return absl::OkStatus();
}

// A language that can be followed, as the group will.
absl::Status CheckLanguage(const OutputLanguage& language) {
  if (language.json_schema.empty()) return absl::OkStatus();
  const char* field = "constraint.json_schema";
  absl::StatusOr<Grammar> grammar = ConformsTo(language.json_schema);
  if (grammar.ok() && GrammarAutomaton(*std::move(grammar)).start() < 0)
    return BadParameter(field, "it is too ambiguous");
  if (grammar.ok()) return absl::OkStatus();
  const std::string message(grammar.status().message());
  if (!absl::IsUnimplemented(grammar.status())) return BadParameter(field, message);
  return WithDetails(absl::UnimplementedError(absl::StrCat(field, ": ", message)),
                     {.reason = "UNSUPPORTED", .field = field, .retry_after = {}, .metadata = {}});
}

absl::Status CheckChoices(const std::vector<std::string>& choices) {
  if (choices.size() > RequestLimits::kMaxChoices) {
    return BadParameter("constraint.choice.choices", absl::StrCat("at most ", RequestLimits::kMaxChoices,
                                                                  " are allowed, not ", choices.size()));
  }
  size_t bytes = 0;
  for (size_t i = 0; i < choices.size(); ++i) {
    const std::string field = absl::StrCat("constraint.choice.choices[", i, "]");
    if (choices[i].empty()) return BadParameter(field, "must not be empty");
    bytes += choices[i].size();
    if (bytes > RequestLimits::kMaxChoiceBytes) {
      return BadParameter(
          field, absl::StrCat("over ", RequestLimits::kMaxChoiceBytes, " bytes with those before it"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckLabels(const std::vector<RequestLabel>& labels) {
  if (labels.size() > RequestLimits::kMaxLabels) {
    return BadParameter(
        "metadata", absl::StrCat("at most ", RequestLimits::kMaxLabels, " are allowed, not ", labels.size()));
  }
  std::set<std::string> seen;
  for (size_t i = 0; i < labels.size(); ++i) {
    const std::string field = absl::StrCat("metadata[", i, "]");
    if (!seen.insert(labels[i].key).second)
      return BadParameter(absl::StrCat(field, ".key"), absl::StrCat("'", labels[i].key, "' comes twice"));
    if (labels[i].key.empty() || labels[i].key.size() > RequestLimits::kMaxLabelKeyBytes) {
      return BadParameter(absl::StrCat(field, ".key"),
                          absl::StrCat("must have 1 to ", RequestLimits::kMaxLabelKeyBytes, " bytes, not ",
                                       labels[i].key.size()));
    }
    if (labels[i].value.size() > RequestLimits::kMaxLabelValueBytes) {
      return BadParameter(absl::StrCat(field, ".value"),
                          absl::StrCat("must have at most ", RequestLimits::kMaxLabelValueBytes,
                                       " bytes, not ", labels[i].value.size()));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckResume(const ClientRequest& request, const GroupInfo& info) {
  if (!request.resume.has_value()) return absl::OkStatus();
  if (request.resume->output.empty()) return BadParameter("resume.output_token_ids", "there is none");
  DFLASH_RETURN_IF_ERROR(
      CheckTokens(request.resume->output, "resume.output_token_ids", info.vocabulary_size));
  if (request.n != 1) return BadParameter("sampling.n", "must be 1 where an output goes on");
  if (!request.seed.has_value() && request.temperature.value_or(info.default_temperature) > 0)
    return BadParameter("sampling.seed", "must be that of the output that goes on");
  if (request.resume->fingerprint != FingerprintOf(info)) {
    return WithDetails(
        absl::AbortedError(
            "resume.model_fingerprint: another model, or another backend, has begun this output"),
        {.reason = "REVISION_MISMATCH",
         .field = "resume.model_fingerprint",
         .retry_after = {},
         .metadata = {}});
  }
  return absl::OkStatus();
}

absl::Status CheckStopping(const ClientRequest& request, const GroupInfo& info) {
  DFLASH_RETURN_IF_ERROR(CheckBadWords(request, info));
  if (request.max_tokens == 0u) return BadParameter("stopping.max_tokens", "must be at least 1");
  if (request.stop_strings.size() > RequestLimits::kMaxStopStrings) {
    return BadParameter("stopping.strings", absl::StrCat("at most ", RequestLimits::kMaxStopStrings,
                                                         " are allowed, not ", request.stop_strings.size()));
  }
  for (size_t i = 0; i < request.stop_strings.size(); ++i) {
    const size_t bytes = request.stop_strings[i].size();
    if (bytes == 0 || bytes > RequestLimits::kMaxStopStringBytes) {
      return BadParameter(
          absl::StrCat("stopping.strings[", i, "]"),
          absl::StrCat("must have 1 to ", RequestLimits::kMaxStopStringBytes, " bytes, not ", bytes));
    }
  }
  if (request.stop_token_ids.size() > RequestLimits::kMaxStopTokens) {
    return BadParameter("stopping.token_ids",
                        absl::StrCat("at most ", RequestLimits::kMaxStopTokens, " are allowed, not ",
                                     request.stop_token_ids.size()));
  }
  return CheckTokens(request.stop_token_ids, "stopping.token_ids", info.vocabulary_size);
}

// `prompt_tokens`: when they were counted.
absl::Status TooLong(const std::string& field, const std::string& text, int64_t limit,
                     std::optional<int64_t> prompt_tokens) {
  ErrorDetails details = {.reason = "CONTEXT_TOO_LONG",
                          .field = field,
                          .retry_after = {},
                          .metadata = {{"limit", absl::StrCat(limit)}}};
  if (prompt_tokens.has_value()) details.metadata.emplace_back("prompt_tokens", absl::StrCat(*prompt_tokens));
  return WithDetails(absl::InvalidArgumentError(absl::StrCat(field, ": ", text)), details);
}

// The most bytes of a prompt that leaves room for one token of output.
size_t MaxPromptBytes(const GroupInfo& info, const PromptEncoder& encoder) {
  return encoder.MaxBytes(info.max_context_tokens - 1);
}

absl::Status TooManyBytes(const std::string& field, const std::string& text, const GroupInfo& info,
                          const PromptEncoder& encoder) {
  return TooLong(field,
                 absl::StrCat(text, ", no text over ", MaxPromptBytes(info, encoder),
                              " fits in the context limit of ", info.max_context_tokens, " tokens"),
                 info.max_context_tokens, std::nullopt);
}

struct EncodedPrompt {
  std::vector<int32_t> tokens;
  std::string field;
};

absl::StatusOr<EncodedPrompt> Encode(const Prompt& prompt, const GroupInfo& info,
                                     const PromptEncoder& encoder) {
  EncodedPrompt encoded;
  if (const auto* text = std::get_if<TextPrompt>(&prompt)) {
    encoded.field = "text";
    DFLASH_ASSIGN_OR_RETURN(encoded.tokens, encoder.EncodeText(text->text));
  } else if (const auto* chat = std::get_if<ChatPrompt>(&prompt)) {
    encoded.field = "chat";
    absl::StatusOr<std::vector<int32_t>> tokens = encoder.EncodeChat(*chat, MaxPromptBytes(info, encoder));
    if (absl::IsOutOfRange(tokens.status()))
      return TooManyBytes(encoded.field, std::string(tokens.status().message()), info, encoder);
    DFLASH_ASSIGN_OR_RETURN(encoded.tokens, std::move(tokens));
  } else if (const auto* tokens = std::get_if<TokenPrompt>(&prompt)) {
    encoded.field = "tokens.ids";
    encoded.tokens.assign(tokens->ids.begin(), tokens->ids.end());
  }
  if (encoded.tokens.empty()) return BadParameter(encoded.field, "the prompt is empty");
  return encoded;
}

}  // namespace

absl::Status Apply(const SpeculationPolicy& policy, ClientRequest* request, GroupInfo* info) {
  if (policy.speculate.has_value())
    info->speculate_by_default = *policy.speculate && info->dflash_block_size > 0;
  if (policy.off_for_all && request->speculation != SpeculationChoice::kOff) {
    if (request->strict_speculation && request->speculation == SpeculationChoice::kDFlash) {
      return WithDetails(
          absl::FailedPreconditionError("speculation.mode: switched off by the operator"),
          {.reason = "METHOD_NOT_LOADED", .field = "speculation.mode", .retry_after = {}, .metadata = {}});
    }
    request->speculation = SpeculationChoice::kOff;
  }
  if (policy.max_draft_tokens > 0 && request->max_draft_tokens != 0u) {
    request->max_draft_tokens =
        std::min(request->max_draft_tokens.value_or(UINT32_MAX), policy.max_draft_tokens);
  }
  return absl::OkStatus();
}

std::string FingerprintOf(const GroupInfo& info) {
  return Sha256()
      .Add(info.model.target_revision)
      .Add(info.feature_contract)
      .Add(info.backend)
      .Add(absl::StrCat(info.ranks))
      .Add(absl::StrCat(info.vocabulary_size))
      .HexDigest()
      .substr(0, 32);
}

uint64_t SeedOfChoice(uint64_t seed, uint32_t index) {
  if (index == 0) return seed;
  uint64_t bits = seed + index * 0x9e3779b97f4a7c15u;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  return bits ^ (bits >> 31);
}

absl::Status CheckRequestId(const std::string& id) {
  const auto legal = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == ':' || c == '-';
  };
  if (id.size() > RequestLimits::kMaxIdBytes || !std::all_of(id.begin(), id.end(), legal)) {
    return BadParameter("request_id", absl::StrCat("must have 1 to ", RequestLimits::kMaxIdBytes,
                                                   " characters of A-Z a-z 0-9 . _ : -"));
  }
  return absl::OkStatus();
}

absl::Status CheckModel(const std::string& model, const std::string& served) {
  if (model.empty() || model == served) return absl::OkStatus();
  return WithDetails(absl::NotFoundError(absl::StrCat("model: this server has '", served, "' only")),
                     {.reason = "MODEL_NOT_FOUND", .field = "model", .retry_after = {}, .metadata = {}});
}

absl::Status CheckChat(const ChatPrompt& chat, const std::string& field) {
  if (chat.messages.empty()) return BadParameter(absl::StrCat(field, ".messages"), "there is no message");
  for (size_t i = 0; i < chat.messages.size(); ++i) {
    if (chat.messages[i].role.empty()) {
      return BadParameter(absl::StrCat(field, ".messages[", i, "].role"), "must be set");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckRequest(const ClientRequest& request, const GroupInfo& info) {
  DFLASH_RETURN_IF_ERROR(CheckPrompt(request, info));
  DFLASH_RETURN_IF_ERROR(CheckFloat(request.temperature, "sampling.temperature",
                                    RequestLimits::kMinTemperature, RequestLimits::kMaxTemperature,
                                    /*zero_allowed=*/true));
  DFLASH_RETURN_IF_ERROR(CheckFloat(request.top_p, "sampling.top_p", RequestLimits::kMinShare, 1));
  DFLASH_RETURN_IF_ERROR(
      CheckFloat(request.min_p, "sampling.min_p", RequestLimits::kMinShare, 1, /*zero_allowed=*/true));
  if (request.top_k.has_value() && *request.top_k > INT32_MAX) {
    return BadParameter("sampling.top_k",
                        absl::StrCat("must be at most ", INT32_MAX, ", not ", *request.top_k));
  }
  DFLASH_RETURN_IF_ERROR(CheckPenalties(request, info));
  DFLASH_RETURN_IF_ERROR(CheckChoices(request.language.choices));
  if (request.n < 1 || request.n > RequestLimits::kMaxN) {
    return BadParameter("sampling.n",
                        absl::StrCat("must be from 1 to ", RequestLimits::kMaxN, ", not ", request.n));
  }
  DFLASH_RETURN_IF_ERROR(CheckLabels(request.labels));
  DFLASH_RETURN_IF_ERROR(CheckResume(request, info));
  if (request.parse && !request.text.value_or(!std::holds_alternative<TokenPrompt>(request.prompt)))
    return BadParameter("output.parse", "needs output.text");
  DFLASH_RETURN_IF_ERROR(CheckStopping(request, info));
  if (request.top_logprobs.value_or(0) > RequestLimits::kMaxTopLogProbs) {
    return BadParameter(
        "output.top_logprobs",
        absl::StrCat("must be at most ", RequestLimits::kMaxTopLogProbs, ", not ", *request.top_logprobs));
  }
  if (request.prompt_logprobs.value_or(0) > RequestLimits::kMaxTopLogProbs) {
    return BadParameter(
        "output.prompt_logprobs",
        absl::StrCat("must be at most ", RequestLimits::kMaxTopLogProbs, ", not ", *request.prompt_logprobs));
  }
  if (request.prompt_logprobs.has_value() && request.resume.has_value()) {
    return BadParameter("output.prompt_logprobs",
                        "they came with the output's beginning; it goes on without them");
  }
  if (request.priority < kMinPriority || request.priority > kMaxPriority) {
    return BadParameter("scheduling.priority", absl::StrCat("must be from ", kMinPriority, " to ",
                                                            kMaxPriority, ", not ", request.priority));
  }
  if (request.max_draft_tokens == 0u) {
    return BadParameter("speculation.max_draft_tokens",
                        "must be at least 1 (speculation.mode switches it off)");
  }
  if (request.cache_salt.size() > RequestLimits::kMaxCacheSaltBytes) {
    return BadParameter("scheduling.cache_salt",
                        absl::StrCat("must have at most ", RequestLimits::kMaxCacheSaltBytes, " bytes, not ",
                                     request.cache_salt.size()));
  }
  if (request.strict_speculation && request.speculation == SpeculationChoice::kDFlash &&
      info.dflash_block_size == 0) {
    return WithDetails(
        absl::FailedPreconditionError("speculation.mode: no DFlash drafter is loaded"),
        {.reason = "METHOD_NOT_LOADED", .field = "speculation.mode", .retry_after = {}, .metadata = {}});
  }
  return absl::OkStatus();
}

absl::Status CheckTextFits(const Prompt& prompt, const GroupInfo& info, const PromptEncoder& encoder) {
  const auto* text = std::get_if<TextPrompt>(&prompt);
  if (text == nullptr || text->text.size() <= MaxPromptBytes(info, encoder)) return absl::OkStatus();
  return TooManyBytes("text", absl::StrCat("the prompt has ", text->text.size(), " bytes"), info, encoder);
}

absl::StatusOr<GroupRequest> Prepare(const ClientRequest& request, const GroupInfo& info,
                                     const PromptEncoder& encoder, uint64_t random_seed) {
  DFLASH_ASSIGN_OR_RETURN(EncodedPrompt prompt, Encode(request.prompt, info, encoder));
  const auto prompt_tokens = static_cast<int64_t>(prompt.tokens.size());
  const int64_t room = info.max_context_tokens - prompt_tokens;
  if (room < 1) {
    return TooLong(prompt.field,
                   absl::StrCat("the prompt has ", prompt_tokens, " tokens, the context limit is ",
                                info.max_context_tokens, " with at least one token of output"),
                   info.max_context_tokens, prompt_tokens);
  }
  if (request.max_tokens.has_value() && *request.max_tokens > room) {
    return TooLong("stopping.max_tokens",
                   absl::StrCat("the prompt has ", prompt_tokens, " tokens, with ", *request.max_tokens,
                                " more it would be over the context limit of ", info.max_context_tokens),
                   info.max_context_tokens, prompt_tokens);
  }
  GroupRequest prepared;
  prepared.prompt_tokens = std::move(prompt.tokens);
  prepared.max_tokens = request.max_tokens.value_or(static_cast<uint32_t>(room));
  prepared.temperature = request.temperature.value_or(info.default_temperature);
  prepared.top_k = static_cast<int32_t>(request.top_k.value_or(static_cast<uint32_t>(info.default_top_k)));
  prepared.top_p = request.top_p.value_or(info.default_top_p);
  prepared.min_p = request.min_p.value_or(info.default_min_p);
  prepared.seed = request.seed.value_or(random_seed);
  prepared.repetition_penalty = request.repetition_penalty.value_or(1);
  prepared.frequency_penalty = request.frequency_penalty.value_or(0);
  prepared.presence_penalty = request.presence_penalty.value_or(0);
  for (const ClientRequest::Bias& bias : request.logit_bias)
    prepared.logit_bias.push_back({.token = static_cast<int32_t>(bias.token), .bias = bias.bias});
  for (const std::vector<uint32_t>& word : request.bad_words)
    prepared.bad_words.emplace_back(word.begin(), word.end());
  if (request.top_logprobs.has_value()) prepared.log_probs = 1 + static_cast<int32_t>(*request.top_logprobs);
  if (request.prompt_logprobs.has_value()) {
    prepared.prompt_log_probs = 1 + static_cast<int32_t>(*request.prompt_logprobs);
    if (prompt_tokens * prepared.prompt_log_probs > RequestLimits::kMaxPromptLogProbs) {
      return BadParameter("output.prompt_logprobs",
                          absl::StrCat("prompt tokens times (1 + prompt_logprobs) must be at most ",
                                       RequestLimits::kMaxPromptLogProbs, ", not ", prompt_tokens, " times ",
                                       prepared.prompt_log_probs));
    }
  }
  if (request.min_tokens > prepared.max_tokens) {
    return BadParameter(
        "stopping.min_tokens",
        absl::StrCat("must be at most max_tokens, ", prepared.max_tokens, ", not ", request.min_tokens));
  }
  if (request.resume.has_value()) {
    if (static_cast<int64_t>(request.resume->output.size()) > prepared.max_tokens) {
      return BadParameter("resume.output_token_ids",
                          absl::StrCat("more than max_tokens, ", prepared.max_tokens));
    }
    prepared.output_tokens.assign(request.resume->output.begin(), request.resume->output.end());
    prepared.report_sent_text = request.parse;
  }
  prepared.min_tokens = request.min_tokens;
  prepared.include_stop_in_text = request.include_stop_in_text;
  DFLASH_RETURN_IF_ERROR(CheckLanguage(request.language));
  prepared.language = request.language;
  const std::optional<int32_t> open = encoder.FindToken("<think>"), close = encoder.FindToken("</think>");
  for (const int32_t token : prepared.prompt_tokens) {
    if (token == open) prepared.thinks = true;
    if (token == close) prepared.thinks = false;
  }
  prepared.language.thinking_open = open.value_or(-1);
  prepared.language.thinking_close = close.value_or(-1);
  if (request.max_thinking_tokens.has_value()) {
    if (!open.has_value() || !close.has_value()) {
      return WithDetails(absl::FailedPreconditionError(
                             "stopping.max_thinking_tokens: the tokenizer has no marks of thinking"),
                         {.reason = "METHOD_NOT_LOADED",
                          .field = "stopping.max_thinking_tokens",
                          .retry_after = {},
                          .metadata = {}});
    }
    prepared.thinking = {.max_tokens = *request.max_thinking_tokens, .open = *open, .close = *close};
  }
  if (!request.ignore_eos) prepared.stop_token_ids = info.eos_token_ids;
  for (uint32_t id : request.stop_token_ids) prepared.stop_token_ids.push_back(static_cast<int32_t>(id));
  prepared.stop_strings = request.stop_strings;
  const bool wanted = request.speculation == SpeculationChoice::kServerDefault
                          ? info.speculate_by_default
                          : request.speculation == SpeculationChoice::kDFlash;
  prepared.speculate = wanted && info.dflash_block_size > 0;
  const int64_t most_drafts = std::max<int64_t>(info.dflash_block_size - 1, 0);
  prepared.max_draft_tokens =
      static_cast<int32_t>(std::min<int64_t>(request.max_draft_tokens.value_or(0), most_drafts));
  prepared.return_text = request.text.value_or(!std::holds_alternative<TokenPrompt>(request.prompt));
  prepared.keep_special_tokens = request.special_tokens_in_text;
  prepared.use_prefix_cache = request.use_prefix_cache;
  prepared.cache_salt = request.cache_salt;
  prepared.deadline = request.deadline;
  prepared.client = request.client;
  prepared.priority = request.priority;
  return prepared;
}

}  // namespace dflash
