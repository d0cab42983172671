#include "daemon/rpc/convert.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "daemon/frontend/prepare.h"
#include "daemon/request/request_error.h"

namespace dflash {
namespace {

absl::Status RefuseUnbuilt(const v1::GenerateRequest& message) {
  switch (message.constraint().kind_case()) {
    case v1::Constraint::kRegex:
      return NotInThisBuild("constraint.regex");
    case v1::Constraint::kEbnf:
      return NotInThisBuild("constraint.ebnf");
    default:
      break;
  }
  if (message.sampling().has_beam_width() && message.sampling().beam_width() != 1)
    return NotInThisBuild("sampling.beam_width");
  if (message.output().min_chunk_interval_ms() != 0) return NotInThisBuild("output.min_chunk_interval_ms");
  if (message.speculation().has_tree_nodes()) return NotInThisBuild("speculation.tree_nodes");
  return absl::OkStatus();
}

absl::StatusOr<SpeculationChoice> FromMessage(v1::SpeculationMode mode) {
  switch (mode) {
    case v1::SPECULATION_MODE_UNSPECIFIED:
      return SpeculationChoice::kServerDefault;
    case v1::SPECULATION_MODE_OFF:
      return SpeculationChoice::kOff;
    case v1::SPECULATION_MODE_DFLASH:
      return SpeculationChoice::kDFlash;
    case v1::SPECULATION_MODE_DFLASH_TREE:
    case v1::SPECULATION_MODE_MTP:
      return NotInThisBuild("speculation.mode", v1::SpeculationMode_Name(mode));
    default:  // proto3 enums are open: a newer client's value
      return BadParameter("speculation.mode", absl::StrCat("unknown value ", static_cast<int>(mode)));
  }
}

void Fill(const PlaceLogProbs& place, v1::TokenLogprobs* to) {
  to->set_logprob(place.log_prob);
  for (const PlaceLogProbs::Top& top : place.top) {
    v1::TokenLogprob* entry = to->add_top();
    entry->set_token_id(static_cast<uint32_t>(top.token));
    entry->set_logprob(top.log_prob);
  }
}

absl::Status CheckCount(int count, size_t limit, const std::string& field) {
  if (static_cast<size_t>(count) <= limit) return absl::OkStatus();
  return BadParameter(field, absl::StrCat("at most ", limit, " are allowed in a chat, not ", count));
}

}  // namespace

absl::StatusOr<ChatPrompt> FromMessage(const v1::ChatPrompt& message) {
  // Before millions of them are copied.
  DFLASH_RETURN_IF_ERROR(
      CheckCount(message.messages_size(), RequestLimits::kMaxChatMessages, "chat.messages"));
  DFLASH_RETURN_IF_ERROR(CheckCount(message.tools_json_size(), RequestLimits::kMaxTools, "chat.tools_json"));
  int calls = 0;
  ChatPrompt chat;
  for (const v1::ChatMessage& turn : message.messages()) {
    if (turn.images_size() > 0)
      return NotInThisBuild(absl::StrCat("chat.messages[", chat.messages.size(), "].images"));
    calls += turn.tool_calls_size();
    DFLASH_RETURN_IF_ERROR(CheckCount(calls, RequestLimits::kMaxToolCalls,
                                      absl::StrCat("chat.messages[", chat.messages.size(), "].tool_calls")));
    ChatMessage& to = chat.messages.emplace_back();
    to.role = turn.role();
    to.content = turn.content();
    if (turn.has_reasoning_content()) to.reasoning_content = turn.reasoning_content();
    for (const v1::ToolCall& call : turn.tool_calls())
      to.tool_calls.push_back({call.name(), call.arguments_json()});
  }
  if (message.has_add_generation_prompt()) chat.add_generation_prompt = message.add_generation_prompt();
  if (message.has_enable_thinking()) chat.enable_thinking = message.enable_thinking();
  if (message.has_preserve_thinking()) chat.preserve_thinking = message.preserve_thinking();
  chat.tools_json.assign(message.tools_json().begin(), message.tools_json().end());
  return chat;
}

absl::StatusOr<ClientRequest> FromMessage(const v1::GenerateRequest& message) {
  DFLASH_RETURN_IF_ERROR(RefuseUnbuilt(message));
  ClientRequest request;
  request.id = message.request_id();
  request.model = message.model();
  switch (message.prompt_case()) {
    case v1::GenerateRequest::kText:
      request.prompt = TextPrompt{message.text()};
      break;
    case v1::GenerateRequest::kTokens:
      request.prompt = TokenPrompt{{message.tokens().ids().begin(), message.tokens().ids().end()}};
      break;
    case v1::GenerateRequest::kChat: {
      DFLASH_ASSIGN_OR_RETURN(request.prompt, FromMessage(message.chat()));
      break;
    }
    case v1::GenerateRequest::PROMPT_NOT_SET:
      break;
  }
  const v1::Sampling& sampling = message.sampling();
  if (sampling.has_temperature()) request.temperature = sampling.temperature();
  if (sampling.has_top_p()) request.top_p = sampling.top_p();
  if (sampling.has_top_k()) request.top_k = sampling.top_k();
  if (sampling.has_min_p()) request.min_p = sampling.min_p();
  if (sampling.has_seed()) request.seed = sampling.seed();
  if (sampling.has_repetition_penalty()) request.repetition_penalty = sampling.repetition_penalty();
  if (sampling.has_frequency_penalty()) request.frequency_penalty = sampling.frequency_penalty();
  if (sampling.has_presence_penalty()) request.presence_penalty = sampling.presence_penalty();
  for (const v1::LogitBias& bias : sampling.logit_bias())
    request.logit_bias.push_back({.token = bias.token_id(), .bias = bias.bias()});
  if (sampling.has_n()) request.n = sampling.n();
  for (const v1::Label& label : message.metadata()) request.labels.push_back({label.key(), label.value()});
  if (message.has_resume()) {
    request.resume = {
        .output = {message.resume().output_token_ids().begin(), message.resume().output_token_ids().end()},
        .fingerprint = message.resume().model_fingerprint()};
  }
  request.parse = message.output().parse();
  const v1::Constraint& constraint = message.constraint();
  if (constraint.kind_case() == v1::Constraint::kJsonSchema) {
    if (constraint.json_schema().empty()) return BadParameter("constraint.json_schema", "is empty");
    request.language.json_schema = constraint.json_schema();
  } else if (constraint.kind_case() == v1::Constraint::kJsonObject) {
    if (!constraint.json_object()) return BadParameter("constraint.json_object", "must be true");
    request.language.json_object = true;
  } else if (constraint.kind_case() == v1::Constraint::kChoice) {
    if (constraint.choice().choices_size() == 0)
      return BadParameter("constraint.choice.choices", "there is none");
    request.language.choices.assign(constraint.choice().choices().begin(),
                                    constraint.choice().choices().end());
  }
  const v1::Stopping& stopping = message.stopping();
  if (stopping.has_max_tokens()) request.max_tokens = stopping.max_tokens();
  request.stop_strings.assign(stopping.strings().begin(), stopping.strings().end());
  request.stop_token_ids.assign(stopping.token_ids().begin(), stopping.token_ids().end());
  request.ignore_eos = stopping.ignore_eos();
  request.min_tokens = stopping.min_tokens();
  request.include_stop_in_text = stopping.include_stop_in_text();
  for (const v1::TokenIds& word : stopping.bad_words())
    request.bad_words.emplace_back(word.ids().begin(), word.ids().end());
  if (stopping.has_max_thinking_tokens()) request.max_thinking_tokens = stopping.max_thinking_tokens();
  if (message.output().has_top_logprobs()) request.top_logprobs = message.output().top_logprobs();
  if (message.output().has_prompt_logprobs()) request.prompt_logprobs = message.output().prompt_logprobs();
  if (message.output().has_text()) request.text = message.output().text();
  request.special_tokens_in_text = message.output().special_tokens_in_text();
  DFLASH_ASSIGN_OR_RETURN(request.speculation, FromMessage(message.speculation().mode()));
  if (message.speculation().has_max_draft_tokens()) {
    request.max_draft_tokens = message.speculation().max_draft_tokens();
  }
  request.strict_speculation = message.speculation().strict();
  request.priority = message.scheduling().priority();
  request.use_prefix_cache = !message.scheduling().no_prefix_cache();
  request.cache_salt = message.scheduling().cache_salt();
  return request;
}

StreamBuffer::Options OutputOptionsOf(const v1::GenerateRequest& message) {
  const v1::OutputOptions& output = message.output();
  StreamBuffer::Options options;
  options.text = output.has_text() ? output.text() : message.prompt_case() != v1::GenerateRequest::kTokens;
  options.tokens = !output.has_token_ids() || output.token_ids();
  options.steps = !output.has_step_info() || output.step_info();
  options.first_token = message.resume().output_token_ids_size();
  return options;
}

v1::Started ToMessage(const StartedOutput& started, const StreamFacts& facts) {
  v1::Started message;
  message.set_request_id(facts.request_id);
  message.set_prompt_tokens(static_cast<uint32_t>(started.prompt_tokens));
  message.set_cached_tokens(static_cast<uint32_t>(started.cached_tokens));
  v1::Sampling* sampling = message.mutable_effective_sampling();
  sampling->set_temperature(facts.request.temperature);
  sampling->set_top_k(static_cast<uint32_t>(facts.request.top_k));
  sampling->set_top_p(facts.request.top_p);
  sampling->set_min_p(facts.request.min_p);
  sampling->set_seed(facts.request.seed);
  sampling->set_repetition_penalty(facts.request.repetition_penalty);
  sampling->set_frequency_penalty(facts.request.frequency_penalty);
  sampling->set_presence_penalty(facts.request.presence_penalty);
  sampling->set_n(facts.n);
  message.set_max_tokens(static_cast<uint32_t>(facts.request.max_tokens));
  message.set_speculation(facts.request.speculate ? v1::SPECULATION_MODE_DFLASH : v1::SPECULATION_MODE_OFF);
  message.set_model(facts.model);
  message.set_model_fingerprint(facts.model_fingerprint);
  for (const RequestLabel& label : facts.labels) {
    v1::Label* to = message.add_metadata();
    to->set_key(label.key);
    to->set_value(label.value);
  }
  return message;
}

v1::Chunk ToMessage(const OutputChunk& chunk, uint32_t index) {
  v1::Chunk message;
  message.set_index(index);
  message.set_reasoning(chunk.reasoning);
  for (const ToolCall& call : chunk.calls) {
    v1::ToolCall* to = message.add_tool_calls();
    to->set_name(call.name);
    to->set_arguments_json(call.arguments_json);
  }
  message.set_first_token_offset(static_cast<uint32_t>(chunk.first_token_offset));
  for (int32_t id : chunk.tokens) message.add_token_ids(static_cast<uint32_t>(id));
  message.set_text(chunk.text);
  for (const PlaceLogProbs& place : chunk.log_probs) Fill(place, message.add_logprobs());
  message.set_first_prompt_position(static_cast<uint32_t>(chunk.first_prompt_position));
  for (const PlaceLogProbs& place : chunk.prompt_log_probs) Fill(place, message.add_prompt_logprobs());
  for (const ChunkStep& step : chunk.steps) {
    v1::StepInfo* to = message.add_steps();
    to->set_drafted(static_cast<uint32_t>(step.drafted));
    to->set_accepted(static_cast<uint32_t>(step.accepted));
    to->set_first_token_offset(static_cast<uint32_t>(step.first_token_offset));
    to->set_token_count(static_cast<uint32_t>(step.token_count));
  }
  return message;
}

v1::Finished ToMessage(const FinishedOutput& finished, const StreamFacts& facts, int64_t cached_tokens,
                       const RequestTimeline& timeline, uint32_t index) {
  v1::Finished message;
  message.set_index(index);
  switch (finished.cause) {
    case StopCause::kStopToken: {
      const auto& own = facts.client_stop_ids;
      const bool asked_for =
          std::find(own.begin(), own.end(), static_cast<uint32_t>(finished.matched_stop_token)) != own.end();
      message.set_reason(asked_for ? v1::FINISH_REASON_STOP_TOKEN : v1::FINISH_REASON_EOS);
      message.set_matched_stop_token(static_cast<uint32_t>(finished.matched_stop_token));
      break;
    }
    case StopCause::kStopString:
      message.set_reason(v1::FINISH_REASON_STOP_STRING);
      message.set_matched_stop_string(finished.matched_stop_string);
      break;
    case StopCause::kLength:
      message.set_reason(v1::FINISH_REASON_LENGTH);
      break;
    case StopCause::kConstraint:
      message.set_reason(v1::FINISH_REASON_CONSTRAINT);
      break;
  }
  v1::Usage* usage = message.mutable_usage();
  usage->set_prompt_tokens(static_cast<uint32_t>(finished.prompt_tokens));
  usage->set_cached_tokens(static_cast<uint32_t>(cached_tokens));
  usage->set_completion_tokens(static_cast<uint32_t>(finished.completion_tokens));
  v1::SpeculationSummary* summary = message.mutable_speculation();
  summary->set_mode(facts.request.speculate ? v1::SPECULATION_MODE_DFLASH : v1::SPECULATION_MODE_OFF);
  summary->set_rounds(static_cast<uint32_t>(finished.rounds));
  summary->set_drafted_tokens(static_cast<uint32_t>(finished.drafted_tokens));
  summary->set_accepted_tokens(static_cast<uint32_t>(finished.accepted_tokens));
  for (int64_t count : finished.drafted_per_position) {
    summary->add_drafted_per_position(static_cast<uint32_t>(count));
  }
  for (int64_t count : finished.accepted_per_position) {
    summary->add_accepted_per_position(static_cast<uint32_t>(count));
  }
  if (finished.rounds > 0) {
    summary->set_mean_acceptance_length(1 + static_cast<double>(finished.accepted_tokens) /
                                                static_cast<double>(finished.rounds));
  }
  message.set_replays(static_cast<uint32_t>(finished.replays));
  v1::Timings* timings = message.mutable_timings();
  timings->set_queue_seconds(absl::ToDoubleSeconds(timeline.queue_time()));
  timings->set_prefill_seconds(absl::ToDoubleSeconds(finished.prefill_time));
  timings->set_time_to_first_token_seconds(absl::ToDoubleSeconds(timeline.time_to_first_token()));
  timings->set_decode_seconds(absl::ToDoubleSeconds(finished.decode_time));
  timings->set_total_seconds(absl::ToDoubleSeconds(timeline.total_time()));
  timings->set_draft_seconds(absl::ToDoubleSeconds(finished.draft_time));
  timings->set_verify_seconds(absl::ToDoubleSeconds(finished.verify_time));
  return message;
}

}  // namespace dflash
