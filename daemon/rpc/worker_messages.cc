#include "daemon/rpc/worker_messages.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/metric_names.h"
#include "base/status.h"

namespace dflash {
namespace {

prometheus::MetricType TypeOf(const MetricInfo& info) {
  switch (info.type) {
    case MetricType::kCounter:
      return prometheus::MetricType::Counter;
    case MetricType::kGauge:
      return prometheus::MetricType::Gauge;
    case MetricType::kHistogram:
      return prometheus::MetricType::Histogram;
  }
  return prometheus::MetricType::Untyped;
}

prometheus::ClientMetric FromMessage(const MetricInfo& info, const wire::MetricSample& sample) {
  prometheus::ClientMetric metric;
  for (const wire::MetricLabel& label : sample.labels())
    metric.label.push_back({label.name(), label.value()});
  switch (info.type) {
    case MetricType::kCounter:
      metric.counter.value = sample.value();
      break;
    case MetricType::kGauge:
      metric.gauge.value = sample.value();
      break;
    case MetricType::kHistogram: {
      const auto& counts = sample.histogram().cumulative_counts();
      for (int i = 0; i < counts.size(); ++i) {
        const auto bound = static_cast<size_t>(i);
        metric.histogram.bucket.push_back({counts[i], bound < info.buckets.size()
                                                          ? info.buckets[bound]
                                                          : std::numeric_limits<double>::infinity()});
      }
      metric.histogram.sample_count = counts.empty() ? 0 : counts[counts.size() - 1];
      metric.histogram.sample_sum = sample.histogram().sum();
      break;
    }
  }
  return metric;
}

PlaceLogProbs FromMessage(const wire::TokenLogprobs& place) {
  PlaceLogProbs log_probs = {.log_prob = place.logprob(), .top = {}};
  for (int i = 0; i < std::min(place.top_ids_size(), place.top_logprobs_size()); ++i)
    log_probs.top.push_back({.token = place.top_ids(i), .log_prob = place.top_logprobs(i)});
  return log_probs;
}

}  // namespace

absl::StatusOr<GroupInfo> FromMessage(const wire::GetGroupInfoResponse& message, const std::string& build) {
  if (message.build() != build) {
    return absl::FailedPreconditionError(
        absl::StrCat("the worker is build ", message.build(), ", the coordinator is build ", build));
  }
  return GroupInfo{.pid = message.pid(),
                   .backend = message.backend(),
                   .ranks = message.ranks(),
                   .feature_contract = message.feature_contract(),
                   .model = {.target_revision = message.model().target_revision(),
                             .drafter_revision = message.model().drafter_revision(),
                             .target_config = message.model().target_config(),
                             .drafter_config = message.model().drafter_config(),
                             .tokenizer = message.model().tokenizer()},
                   .vocabulary_size = message.vocabulary_size(),
                   .max_context_tokens = message.max_context_tokens(),
                   .max_sequences = message.max_sequences(),
                   .same_text_rows = message.same_text_rows(),
                   .dflash_block_size = message.dflash_block_size(),
                   .speculate_by_default = message.speculate_by_default(),
                   .eos_token_ids = {message.eos_token_ids().begin(), message.eos_token_ids().end()},
                   .default_temperature = message.default_temperature(),
                   .default_top_k = message.default_top_k(),
                   .default_top_p = message.default_top_p(),
                   .default_min_p = message.default_min_p(),
                   .self_test = message.self_test(),
                   .self_test_detail = message.self_test_detail(),
                   .fingerprints = std::make_shared<const std::map<std::string, std::string>>(
                       message.fingerprints().begin(), message.fingerprints().end())};
}

wire::Submit ToMessage(const std::string& key, const GroupRequest& request, absl::Time now) {
  wire::Submit submit;
  submit.set_id(key);
  submit.set_client(request.client);
  submit.set_priority(request.priority);
  submit.mutable_prompt_tokens()->Add(request.prompt_tokens.begin(), request.prompt_tokens.end());
  submit.set_temperature(request.temperature);
  submit.set_top_k(request.top_k);
  submit.set_top_p(request.top_p);
  submit.set_min_p(request.min_p);
  submit.set_seed(request.seed);
  submit.set_repetition_penalty(request.repetition_penalty);
  submit.set_frequency_penalty(request.frequency_penalty);
  submit.set_presence_penalty(request.presence_penalty);
  for (const TokenBias& bias : request.logit_bias) {
    wire::LogitBias* to = submit.add_logit_bias();
    to->set_token_id(bias.token);
    to->set_bias(bias.bias);
  }
  for (const std::vector<int32_t>& word : request.bad_words)
    submit.add_bad_words()->mutable_ids()->Add(word.begin(), word.end());
  if (request.thinking.max_tokens >= 0) {
    submit.mutable_thinking()->set_max_tokens(request.thinking.max_tokens);
    submit.mutable_thinking()->set_open(request.thinking.open);
    submit.mutable_thinking()->set_close(request.thinking.close);
  }
  if (request.language.any()) {
    wire::Constraint* constraint = submit.mutable_constraint();
    if (request.language.json_object) constraint->set_json_object(true);
    if (!request.language.json_schema.empty()) constraint->set_json_schema(request.language.json_schema);
    for (const std::string& choice : request.language.choices)
      constraint->mutable_choice()->add_choices(choice);
    constraint->set_thinking_open(request.language.thinking_open);
    constraint->set_thinking_close(request.language.thinking_close);
  }
  submit.set_max_tokens(request.max_tokens);
  submit.set_min_tokens(request.min_tokens);
  submit.set_include_stop_in_text(request.include_stop_in_text);
  submit.set_logprobs(request.log_probs);
  submit.set_prompt_logprobs(request.prompt_log_probs);
  submit.set_prompt_logprobs_done(request.prompt_log_probs_done);
  submit.mutable_output_tokens()->Add(request.output_tokens.begin(), request.output_tokens.end());
  submit.set_report_sent_text(request.report_sent_text);
  submit.mutable_stop_token_ids()->Add(request.stop_token_ids.begin(), request.stop_token_ids.end());
  for (const std::string& stop : request.stop_strings) submit.add_stop_strings(stop);
  submit.set_speculate(request.speculate);
  submit.set_max_draft_tokens(request.max_draft_tokens);
  submit.set_return_text(request.return_text);
  submit.set_keep_special_tokens(request.keep_special_tokens);
  submit.set_no_prefix_cache(!request.use_prefix_cache);
  submit.set_cache_salt(request.cache_salt);
  if (request.deadline != absl::InfiniteFuture()) {
    submit.set_deadline_microseconds(std::max<int64_t>(1, absl::ToInt64Microseconds(request.deadline - now)));
  }
  return submit;
}

StepOutput FromMessage(wire::Tokens&& message) {
  StepOutput output;
  output.tokens.assign(message.token_ids().begin(), message.token_ids().end());
  output.text = std::move(*message.mutable_text());
  for (const wire::Round& round : message.rounds()) {
    output.rounds.push_back({.drafted = round.drafted(), .accepted = round.accepted()});
  }
  for (const wire::TokenLogprobs& place : message.logprobs()) output.log_probs.push_back(FromMessage(place));
  for (const wire::TokenLogprobs& place : message.prompt_logprobs())
    output.prompt_log_probs.push_back(FromMessage(place));
  return output;
}

FinishedOutput FromMessage(const wire::Finished& message) {
  FinishedOutput finished;
  switch (message.reason()) {
    case wire::FINISH_REASON_STOP_TOKEN:
      finished.cause = StopCause::kStopToken;
      break;
    case wire::FINISH_REASON_STOP_STRING:
      finished.cause = StopCause::kStopString;
      break;
    case wire::FINISH_REASON_CONSTRAINT:
      finished.cause = StopCause::kConstraint;
      break;
    default:
      finished.cause = StopCause::kLength;
  }
  finished.matched_stop_token = message.matched_stop_token();
  finished.matched_stop_string = message.matched_stop_string();
  finished.prompt_tokens = message.prompt_tokens();
  finished.completion_tokens = message.completion_tokens();
  finished.rounds = message.rounds();
  finished.drafted_tokens = message.drafted_tokens();
  finished.accepted_tokens = message.accepted_tokens();
  finished.drafted_per_position.assign(message.drafted_per_position().begin(),
                                       message.drafted_per_position().end());
  finished.accepted_per_position.assign(message.accepted_per_position().begin(),
                                        message.accepted_per_position().end());
  finished.prefill_time = absl::Seconds(message.prefill_seconds());
  finished.decode_time = absl::Seconds(message.decode_seconds());
  finished.draft_time = absl::Seconds(message.draft_seconds());
  finished.verify_time = absl::Seconds(message.verify_seconds());
  return finished;
}

absl::Status FromMessage(const wire::Failed& message) {
  if (message.code() <= 0 || message.code() > 16) {
    return absl::InternalError(
        absl::StrCat("the worker reported code ", message.code(), ": ", message.message()));
  }
  const absl::Status status(static_cast<absl::StatusCode>(message.code()), message.message());
  return message.reason().empty() ? status : WithReason(status, message.reason());
}

std::vector<prometheus::MetricFamily> FromMessage(const wire::MetricsSnapshot& message) {
  std::vector<prometheus::MetricFamily> families;
  for (const wire::MetricFamily& family : message.families()) {
    const MetricInfo* info = metrics::Find(family.name());
    if (info == nullptr) continue;
    prometheus::MetricFamily& target = families.emplace_back();
    target.name = info->name;
    target.help = info->help;
    target.type = TypeOf(*info);
    for (const wire::MetricSample& sample : family.samples())
      target.metric.push_back(FromMessage(*info, sample));
  }
  return families;
}

}  // namespace dflash
