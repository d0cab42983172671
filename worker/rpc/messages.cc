#include "worker/rpc/messages.h"

#include <utility>

#include "base/check.h"
#include "base/status.h"

namespace dflash {

wire::GetGroupInfoResponse ToMessage(const GroupIdentity& identity, int32_t pid) {
  wire::GetGroupInfoResponse message;
  message.set_build(identity.build);
  message.set_pid(pid);
  message.set_backend(identity.backend);
  message.set_ranks(static_cast<uint32_t>(identity.ranks));
  message.set_feature_contract(identity.feature_contract);
  wire::ModelIdentity* model = message.mutable_model();
  model->set_target_revision(identity.model.target_revision);
  model->set_drafter_revision(identity.model.drafter_revision);
  model->set_target_config(identity.model.target_config);
  model->set_drafter_config(identity.model.drafter_config);
  model->set_tokenizer(identity.model.tokenizer);
  message.set_vocabulary_size(static_cast<uint32_t>(identity.vocabulary_size));
  message.set_max_context_tokens(static_cast<uint32_t>(identity.max_context_tokens));
  message.set_max_sequences(static_cast<uint32_t>(identity.max_sequences));
  message.set_same_text_rows(static_cast<uint32_t>(identity.same_text_rows));
  message.set_dflash_block_size(static_cast<uint32_t>(identity.dflash_block_size));
  message.set_speculate_by_default(identity.speculate_by_default);
  for (int32_t id : identity.eos_token_ids) message.add_eos_token_ids(id);
  message.set_default_temperature(identity.default_temperature);
  message.set_default_top_k(identity.default_top_k);
  message.set_default_top_p(identity.default_top_p);
  message.set_default_min_p(identity.default_min_p);
  message.set_self_test(identity.self_test);
  message.set_self_test_detail(identity.self_test_detail);
  message.mutable_fingerprints()->insert(identity.fingerprints.begin(), identity.fingerprints.end());
  return message;
}

GenerationRequest FromMessage(wire::Submit&& submit, absl::Time now) {
  GenerationRequest request;
  request.id = std::move(*submit.mutable_id());
  request.client = std::move(*submit.mutable_client());
  request.priority = submit.priority();
  request.prompt_tokens.assign(submit.prompt_tokens().begin(), submit.prompt_tokens().end());
  request.sampling.temperature = submit.temperature();
  request.sampling.top_k = submit.top_k();
  request.sampling.top_p = submit.top_p();
  request.sampling.min_p = submit.min_p();
  request.sampling.seed = submit.seed();
  request.repetition_penalty = submit.repetition_penalty();
  request.frequency_penalty = submit.frequency_penalty();
  request.presence_penalty = submit.presence_penalty();
  for (const wire::LogitBias& bias : submit.logit_bias())
    request.logit_bias.push_back({.token = bias.token_id(), .bias = bias.bias()});
  for (const wire::TokenIds& word : submit.bad_words())
    request.bad_words.emplace_back(word.ids().begin(), word.ids().end());
  if (submit.has_thinking()) {
    request.thinking = {.max_tokens = submit.thinking().max_tokens(),
                        .open = submit.thinking().open(),
                        .close = submit.thinking().close()};
  }
  if (submit.has_constraint()) {
    wire::Constraint& constraint = *submit.mutable_constraint();
    request.constraint.json_object = constraint.json_object();
    if (constraint.kind_case() == wire::Constraint::kJsonSchema)
      request.constraint.json_schema = std::move(*constraint.mutable_json_schema());
    request.constraint.choices.assign(constraint.choice().choices().begin(),
                                      constraint.choice().choices().end());
    request.constraint.thinking_open = constraint.thinking_open();
    request.constraint.thinking_close = constraint.thinking_close();
  }
  request.max_tokens = submit.max_tokens();
  request.min_tokens = submit.min_tokens();
  request.include_stop_in_text = submit.include_stop_in_text();
  request.log_probs = submit.logprobs();
  request.prompt_log_probs = submit.prompt_logprobs();
  request.prompt_log_probs_done = submit.prompt_logprobs_done();
  request.output_tokens.assign(submit.output_tokens().begin(), submit.output_tokens().end());
  request.report_sent_text = submit.report_sent_text();
  request.stop_token_ids.assign(submit.stop_token_ids().begin(), submit.stop_token_ids().end());
  request.stop_strings.assign(submit.stop_strings().begin(), submit.stop_strings().end());
  request.speculation = submit.speculate() ? SpeculationMode::kDFlash : SpeculationMode::kOff;
  request.max_draft_tokens = submit.max_draft_tokens();
  request.return_text = submit.return_text();
  request.keep_special_tokens = submit.keep_special_tokens();
  request.use_prefix_cache = !submit.no_prefix_cache();
  request.cache_salt = std::move(*submit.mutable_cache_salt());
  if (submit.deadline_microseconds() != 0) {
    request.deadline = now + absl::Microseconds(submit.deadline_microseconds());
  }
  return request;
}

wire::Started ToMessage(const std::string& id, const StartedReport& report) {
  wire::Started message;
  message.set_id(id);
  message.set_prompt_tokens(report.prompt_tokens);
  message.set_cached_tokens(report.cached_tokens);
  message.set_sent_text(report.sent_text);
  return message;
}

namespace {

void Fill(const TokenLogProbs& place, wire::TokenLogprobs* entry) {
  entry->set_logprob(place.log_prob);
  for (const TokenLogProbs::Top& top : place.top) {
    entry->add_top_ids(top.token);
    entry->add_top_logprobs(top.log_prob);
  }
}

}  // namespace

wire::Tokens ToMessage(const std::string& id, TokensReport&& report) {
  wire::Tokens message;
  message.set_id(id);
  for (int32_t token : report.tokens) message.add_token_ids(token);
  message.set_text(std::move(report.text));
  for (const RoundReport& round : report.rounds) {
    wire::Round* entry = message.add_rounds();
    entry->set_drafted(round.drafted);
    entry->set_accepted(round.accepted);
  }
  for (const TokenLogProbs& place : report.log_probs) Fill(place, message.add_logprobs());
  for (const TokenLogProbs& place : report.prompt_log_probs) Fill(place, message.add_prompt_logprobs());
  return message;
}

namespace {

wire::FinishReason ToMessage(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStopToken:
      return wire::FINISH_REASON_STOP_TOKEN;
    case FinishReason::kStopString:
      return wire::FINISH_REASON_STOP_STRING;
    case FinishReason::kLength:
      return wire::FINISH_REASON_LENGTH;
    case FinishReason::kConstraint:
      return wire::FINISH_REASON_CONSTRAINT;
  }
  DFLASH_CHECK(false);
  return wire::FINISH_REASON_UNSPECIFIED;
}

}  // namespace

wire::Finished ToMessage(const std::string& id, const FinishedReport& report) {
  wire::Finished message;
  message.set_id(id);
  message.set_reason(ToMessage(report.reason));
  message.set_matched_stop_token(report.matched_stop_token);
  message.set_matched_stop_string(report.matched_stop_string);
  message.set_prompt_tokens(report.prompt_tokens);
  message.set_completion_tokens(report.completion_tokens);
  message.set_rounds(report.rounds);
  message.set_drafted_tokens(report.drafted_tokens);
  message.set_accepted_tokens(report.accepted_tokens);
  for (int64_t count : report.drafted_per_position) message.add_drafted_per_position(count);
  for (int64_t count : report.accepted_per_position) message.add_accepted_per_position(count);
  message.set_prefill_seconds(absl::ToDoubleSeconds(report.prefill_time));
  message.set_decode_seconds(absl::ToDoubleSeconds(report.decode_time));
  message.set_draft_seconds(absl::ToDoubleSeconds(report.draft_time));
  message.set_verify_seconds(absl::ToDoubleSeconds(report.verify_time));
  return message;
}

wire::Failed ToMessage(const std::string& id, const absl::Status& status) {
  wire::Failed message;
  message.set_id(id);
  message.set_code(static_cast<int32_t>(status.code()));
  message.set_message(std::string(status.message()));
  message.set_reason(ReasonOf(status));
  return message;
}

wire::MetricsSnapshot ToMessage(const std::vector<prometheus::MetricFamily>& families) {
  wire::MetricsSnapshot snapshot;
  for (const prometheus::MetricFamily& family : families) {
    wire::MetricFamily* family_message = snapshot.add_families();
    family_message->set_name(family.name);
    for (const prometheus::ClientMetric& metric : family.metric) {
      wire::MetricSample* sample = family_message->add_samples();
      for (const auto& label : metric.label) {
        wire::MetricLabel* label_message = sample->add_labels();
        label_message->set_name(label.name);
        label_message->set_value(label.value);
      }
      if (family.type == prometheus::MetricType::Histogram) {
        for (const auto& bucket : metric.histogram.bucket) {
          sample->mutable_histogram()->add_cumulative_counts(bucket.cumulative_count);
        }
        sample->mutable_histogram()->set_sum(metric.histogram.sample_sum);
      } else {
        sample->set_value(family.type == prometheus::MetricType::Counter ? metric.counter.value
                                                                         : metric.gauge.value);
      }
    }
  }
  return snapshot;
}

}  // namespace dflash
