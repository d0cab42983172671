#include "daemon/frontend/prepare.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status.h"
#include "daemon/request/request_error.h"

namespace dflash {
namespace {

absl::Status CheckFloat(const std::optional<float>& value, const char* field, float min, float max,
                        bool min_allowed) {
  if (!value.has_value()) return absl::OkStatus();
  const bool ok = std::isfinite(*value) && *value <= max && (min_allowed ? *value >= min : *value > min);
  if (ok) return absl::OkStatus();
  // All digits of the value: 1.0000001 is not "1".
  return BadParameter(field, absl::StrFormat("must be %s %g %s %g, not %.9g", min_allowed ? "from" : "above",
                                             min, min_allowed ? "to" : "and at most", max, *value));
}

absl::Status CheckTokens(const std::vector<uint32_t>& ids, const std::string& field, int64_t vocabulary) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= static_cast<uint64_t>(vocabulary)) {
      return BadParameter(
          absl::StrCat(field, "[", i, "]"),
          absl::StrCat("token id ", ids[i], " is out of range: the vocabulary has ", vocabulary, " tokens"));
    }
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

absl::Status CheckStopping(const ClientRequest& request, const GroupInfo& info) {
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

absl::Status TooLong(const std::string& field, const std::string& text, int64_t limit,
                     int64_t prompt_tokens) {
  return WithDetails(
      absl::InvalidArgumentError(absl::StrCat(field, ": ", text)),
      {.reason = "CONTEXT_TOO_LONG",
       .field = field,
       .retry_after = {},
       .metadata = {{"limit", absl::StrCat(limit)}, {"prompt_tokens", absl::StrCat(prompt_tokens)}}});
}

struct EncodedPrompt {
  std::vector<int32_t> tokens;
  std::string field;
};

absl::StatusOr<EncodedPrompt> Encode(const Prompt& prompt, const PromptEncoder& encoder) {
  EncodedPrompt encoded;
  if (const auto* text = std::get_if<TextPrompt>(&prompt)) {
    encoded.field = "text";
    DFLASH_ASSIGN_OR_RETURN(encoded.tokens, encoder.EncodeText(text->text));
  } else if (const auto* chat = std::get_if<ChatPrompt>(&prompt)) {
    encoded.field = "chat";
    DFLASH_ASSIGN_OR_RETURN(encoded.tokens, encoder.EncodeChat(*chat));
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
  if (chat.messages.size() > RequestLimits::kMaxChatMessages) {
    return BadParameter(absl::StrCat(field, ".messages"),
                        absl::StrCat("at most ", RequestLimits::kMaxChatMessages, " are allowed, not ",
                                     chat.messages.size()));
  }
  for (size_t i = 0; i < chat.messages.size(); ++i) {
    if (chat.messages[i].role.empty()) {
      return BadParameter(absl::StrCat(field, ".messages[", i, "].role"), "must be set");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckRequest(const ClientRequest& request, const GroupInfo& info) {
  DFLASH_RETURN_IF_ERROR(CheckPrompt(request, info));
  DFLASH_RETURN_IF_ERROR(CheckFloat(request.temperature, "sampling.temperature", 0,
                                    RequestLimits::kMaxTemperature, /*min_allowed=*/true));
  DFLASH_RETURN_IF_ERROR(CheckFloat(request.top_p, "sampling.top_p", 0, 1, /*min_allowed=*/false));
  DFLASH_RETURN_IF_ERROR(CheckFloat(request.min_p, "sampling.min_p", 0, 1, /*min_allowed=*/true));
  if (request.top_k.has_value() && *request.top_k > INT32_MAX) {
    return BadParameter("sampling.top_k",
                        absl::StrCat("must be at most ", INT32_MAX, ", not ", *request.top_k));
  }
  DFLASH_RETURN_IF_ERROR(CheckStopping(request, info));
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

absl::StatusOr<GroupRequest> Prepare(const ClientRequest& request, const GroupInfo& info,
                                     const PromptEncoder& encoder, uint64_t random_seed) {
  DFLASH_ASSIGN_OR_RETURN(EncodedPrompt prompt, Encode(request.prompt, encoder));
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
