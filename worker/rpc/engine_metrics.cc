#include "worker/rpc/engine_metrics.h"

#include <algorithm>

namespace dflash {
namespace {

constexpr char kMethod[] = "dflash";
constexpr const char* kContentNames[kContentClasses] = {"text", "code", "thinking", "tool"};
constexpr const char* kOriginNames[kContextOrigins] = {"cold", "prefix", "resumed"};

double Ratio(int64_t part, int64_t whole) {
  return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0;
}

}  // namespace

const char* Name(SelfTestResult result) {
  constexpr const char* kNames[] = {"skipped", "passed", "failed", "overridden"};
  return kNames[static_cast<size_t>(result)];
}

// Series are made at once rather than when first observed: a rate needs the zero before the first event.
EngineMetrics::EngineMetrics(const Options& options)
    : speculate_by_default_(options.max_drafts > 0 && options.speculate_by_default) {
  for (const char* kind : {"prefill", "verify", "mixed"}) {
    for (bool captured : {false, true}) {
      const char* exec = captured ? "graph" : "eager";
      steps_[{kind, captured}] = &registry_.Counter(metrics::kEngineSteps, {{"kind", kind}, {"exec", exec}});
    }
    step_seconds_[kind] = &registry_.Histogram(metrics::kEngineStepSeconds, {{"kind", kind}});
  }
  for (const char* part : {"schedule", "draft", "verify", "sample", "commit", "detokenize"}) {
    part_seconds_[part] = &registry_.Histogram(metrics::kEngineStepPartSeconds, {{"part", part}});
  }
  preemptions_ = &registry_.Counter(metrics::kPreemptions, {{"reason", "pages"}});
  batch_size_ = &registry_.Histogram(metrics::kBatchSize);
  batch_tokens_ = &registry_.Histogram(metrics::kBatchTokens);
  const MetricLabels method = {{"method", kMethod}};
  drafts_ = &registry_.Counter(metrics::kSpecDrafts, method);
  draft_tokens_ = &registry_.Counter(metrics::kSpecDraftTokens, method);
  cut_draft_tokens_ = &registry_.Counter(metrics::kSpecCutDraftTokens, method);
  accepted_tokens_ = &registry_.Counter(metrics::kSpecAcceptedTokens, method);
  for (int64_t position = 0; position < options.max_drafts; ++position) {
    const MetricLabels labels = {{"method", kMethod}, {"position", std::to_string(position)}};
    drafted_at_.push_back(&registry_.Counter(metrics::kSpecDraftTokensPerPosition, labels));
    accepted_at_.push_back(&registry_.Counter(metrics::kSpecAcceptedTokensPerPosition, labels));
    predicted_at_.push_back(&registry_.Counter(metrics::kSpecPredictedTokensPerPosition, labels));
  }
  for (size_t bin = 0; bin < kConfidenceBins; ++bin) {
    const MetricLabels labels = {{"method", kMethod}, {"confidence", "0." + std::to_string(bin)}};
    confidence_drafts_[bin] = &registry_.Counter(metrics::kSpecConfidenceDrafts, labels);
    confidence_accepted_[bin] = &registry_.Counter(metrics::kSpecConfidenceAccepted, labels);
  }
  for (size_t i = 0; i < contents_.size(); ++i) {
    const MetricLabels labels = {{"method", kMethod}, {"content", kContentNames[i]}};
    contents_[i] = {.drafts = &registry_.Counter(metrics::kSpecContentDrafts, labels),
                    .draft_tokens = &registry_.Counter(metrics::kSpecContentDraftTokens, labels),
                    .accepted_tokens = &registry_.Counter(metrics::kSpecContentAcceptedTokens, labels),
                    .first_accepted = &registry_.Counter(metrics::kSpecContentFirstAccepted, labels)};
  }
  for (size_t i = 0; i < origins_.size(); ++i) {
    const MetricLabels labels = {{"method", kMethod}, {"origin", kOriginNames[i]}};
    origins_[i] = {.drafts = &registry_.Counter(metrics::kSpecOriginDrafts, labels),
                   .accepted_tokens = &registry_.Counter(metrics::kSpecOriginAcceptedTokens, labels),
                   .first_accepted = &registry_.Counter(metrics::kSpecOriginFirstAccepted, labels)};
  }
  context_tokens_ = &registry_.Counter(metrics::kSpecContextTokens, method);
  context_missing_ = &registry_.Counter(metrics::kSpecContextMissingTokens, method);
  accepted_per_step_ =
      &registry_.Histogram(metrics::kSpecAcceptedPerStep, {{"method", kMethod}, {"constrained", "no"}});
  draft_seconds_ = &registry_.Counter(metrics::kSpecDraftSeconds, method);
  verify_seconds_ = &registry_.Counter(metrics::kSpecVerifySeconds, method);
  queried_tokens_ = &registry_.Counter(metrics::kPrefixCacheQueriedTokens);
  std::vector<const char*> pools = {"target_full", "gdn_state"};
  if (options.max_drafts > 0) pools.push_back("draft_full");
  for (const char* pool : pools) {
    hit_tokens_[pool] = &registry_.Counter(metrics::kPrefixCacheHitTokens, {{"pool", pool}});
    limited_[pool] = &registry_.Counter(metrics::kPrefixCacheLimited, {{"pool", pool}});
  }
  hit_tokens_["effective"] = &registry_.Counter(metrics::kPrefixCacheHitTokens, {{"pool", "effective"}});
  for (const char* reason : {"auto_batch", "auto_low_accept", "disabled_request", "near_max_len"})
    skipped_[reason] = &registry_.Counter(metrics::kSpecSkipped, {{"reason", reason}});
  for (int64_t rows : BlockLengths(options.max_drafts + 1))
    OnBlock({.rows = rows, .reason = BlockReason::kBest}, 0);
  for (const char* pool : {"kv", "checkpoint"})
    evictions_[pool] = &registry_.Counter(metrics::kPrefixCacheEvictions, {{"pool", pool}});
  registry_.Gauge(metrics::kGroupInfo, {{"backend", options.backend}}).Set(1);
  if (!options.config.empty()) registry_.Gauge(metrics::kSpecConfig, options.config).Set(1);
  for (const auto& [kind, bytes] : options.memory_bytes) {
    registry_.Gauge(metrics::kMemoryBytes, {{"kind", kind}}).Set(static_cast<double>(bytes));
  }
  SetSelfTest(SelfTestResult::kSkipped);
  SetGauges(EngineGauges());
}

void EngineMetrics::SetSelfTest(SelfTestResult result) {
  for (const SelfTestResult each : {SelfTestResult::kSkipped, SelfTestResult::kPassed,
                                    SelfTestResult::kFailed, SelfTestResult::kOverridden}) {
    registry_.Gauge(metrics::kSpecSelfTest, {{"method", kMethod}, {"result", Name(each)}})
        .Set(each == result);
  }
  const bool refused = result == SelfTestResult::kFailed;
  registry_.Gauge(metrics::kSpecEnabled, {{"method", kMethod}}).Set(speculate_by_default_ && !refused);
  {
    absl::MutexLock lock(&health_mutex_);
    refused_ = refused;
  }
  PublishHealth();
}

void EngineMetrics::PublishHealth() {
  SpeculationHealth health;
  {
    absl::MutexLock lock(&health_mutex_);
    health = health_.Judge();
    if (refused_) health.reason = HealthReason::kSelfTestFailed;
  }
  const MetricLabels method = {{"method", kMethod}};
  registry_.Gauge(metrics::kSpecCalibrationGap, method).Set(health.gap());
  registry_.Gauge(metrics::kSpecFirstDraftAcceptance, method).Set(health.first_acceptance);
  registry_.Gauge(metrics::kSpecHealthRounds, method).Set(static_cast<double>(health.rounds));
  for (int i = 0; i < kHealthReasons; ++i) {
    const auto reason = static_cast<HealthReason>(i);
    registry_
        .Gauge(metrics::kSpecHealth,
               {{"method", kMethod}, {"verdict", Name(VerdictOf(reason))}, {"reason", Name(reason)}})
        .Set(reason == health.reason);
  }
}

void EngineMetrics::SetGauges(const EngineGauges& gauges) {
  PublishHealth();
  const int64_t pages_used = gauges.pages_total - gauges.pages_free - gauges.pages_evictable;
  registry_.Gauge(metrics::kCacheUsage, {{"pool", "kv"}}).Set(Ratio(pages_used, gauges.pages_total));
  registry_.Gauge(metrics::kCacheUsage, {{"pool", "state"}}).Set(Ratio(gauges.running, gauges.state_slots));
  const auto blocks = [&](const char* pool, const char* state, int64_t count) {
    registry_.Gauge(metrics::kCacheBlocks, {{"pool", pool}, {"state", state}})
        .Set(static_cast<double>(count));
  };
  blocks("kv", "used", pages_used);
  blocks("kv", "free", gauges.pages_free);
  blocks("kv", "evictable", gauges.pages_evictable);
  blocks("state", "used", gauges.running);
  blocks("state", "free", gauges.state_slots - gauges.running);
  registry_.Gauge(metrics::kCacheUsage, {{"pool", "checkpoint"}})
      .Set(Ratio(gauges.checkpoints_used, gauges.checkpoints_total));
  blocks("checkpoint", "evictable", gauges.checkpoints_used);
  blocks("checkpoint", "free", gauges.checkpoints_total - gauges.checkpoints_used);
}

// Drafter context lies in the same pages as the target's keys and values, so it never limits a hit.
void EngineMetrics::OnPrefix(const PrefixReport& prefix) {
  queried_tokens_->Increment(static_cast<double>(prefix.prompt_tokens));
  const std::pair<const char*, int64_t> pools[] = {{"target_full", prefix.page_tokens},
                                                   {"draft_full", prefix.page_tokens},
                                                   {"gdn_state", prefix.state_tokens}};
  const int64_t most = std::max(prefix.page_tokens, prefix.state_tokens);
  for (const auto& [pool, tokens] : pools) {
    if (!hit_tokens_.contains(pool)) continue;
    hit_tokens_[pool]->Increment(static_cast<double>(tokens));
    if (tokens < most) limited_[pool]->Increment();
  }
  hit_tokens_["effective"]->Increment(static_cast<double>(prefix.tokens));
}

void EngineMetrics::OnBlock(const BlockReport& block, int64_t rounds) {
  prometheus::Counter*& counter = blocks_[{block.rows, block.reason}];
  if (counter == nullptr) {
    counter = &registry_.Counter(metrics::kSpecBlockRounds, {{"block_rows", std::to_string(block.rows)},
                                                             {"reason", Name(block.reason)}});
  }
  counter->Increment(static_cast<double>(rounds));
}

void EngineMetrics::Kind::Add(const RoundReport& round) const {
  drafts->Increment();
  if (draft_tokens != nullptr) draft_tokens->Increment(round.drafted);
  accepted_tokens->Increment(round.accepted);
  if (round.accepted > 0) first_accepted->Increment();
}

void EngineMetrics::OnRound(const DecodedRound& decoded) {
  const RoundReport& round = decoded.round;
  if (round.drafted == 0) return;
  drafts_->Increment();
  draft_tokens_->Increment(round.drafted);
  cut_draft_tokens_->Increment(static_cast<double>(decoded.cut_drafts));
  accepted_tokens_->Increment(round.accepted);
  const auto up_to = [](int32_t count, std::vector<prometheus::Counter*>& counters) {
    for (size_t i = 0; i < std::min(counters.size(), static_cast<size_t>(count)); ++i)
      counters[i]->Increment();
  };
  up_to(round.drafted, drafted_at_);
  up_to(round.accepted, accepted_at_);
  accepted_per_step_->Observe(round.accepted);
  contents_[static_cast<size_t>(decoded.content)].Add(round);
  origins_[static_cast<size_t>(decoded.origin)].Add(round);
  context_tokens_->Increment(static_cast<double>(decoded.context_tokens));
  context_missing_->Increment(static_cast<double>(decoded.context_missing));
  OnCalibration(decoded);
  absl::MutexLock lock(&health_mutex_);
  health_.Add(decoded);
}

void EngineMetrics::OnCalibration(const DecodedRound& decoded) {
  const std::vector<float>& confidences = decoded.confidences;
  // Where an accepted draft ended the output, those behind it never had a chance.
  const bool ended = decoded.emitted == decoded.round.accepted;
  const size_t judged = std::min({confidences.size(), predicted_at_.size(),
                                  static_cast<size_t>(ended ? decoded.emitted : decoded.round.drafted)});
  double survival = 1;
  for (size_t d = 0; d < judged; ++d) {
    survival *= static_cast<double>(confidences[d]);
    predicted_at_[d]->Increment(survival);
  }
  if (decoded.other_law || decoded.temperature > 1) return;  // as HealthMonitor
  const size_t reached = std::min(confidences.size(), static_cast<size_t>(ReachedDrafts(decoded)));
  for (size_t d = 0; d < reached; ++d) {
    const size_t bin = std::min(static_cast<size_t>(confidences[d] * kConfidenceBins), kConfidenceBins - 1);
    confidence_drafts_[bin]->Increment();
    if (static_cast<int32_t>(d) < decoded.round.accepted) confidence_accepted_[bin]->Increment();
  }
}

void EngineMetrics::OnStep(const StepReport& report, const EngineGauges&) {
  if (muted_) return;
  for (const PrefixReport& prefix : report.prefixes) OnPrefix(prefix);
  const char* kind = report.verify_rows == 0 ? "prefill" : report.prefill_rows == 0 ? "verify" : "mixed";
  steps_[{kind, report.captured}]->Increment();
  step_seconds_[kind]->Observe(absl::ToDoubleSeconds(report.total_time));
  const auto part = [&](const char* name, absl::Duration time) {
    part_seconds_[name]->Observe(absl::ToDoubleSeconds(time));
  };
  part("schedule", report.schedule_time);
  part("verify", report.forward_time);
  part("sample", report.sample_time);
  part("commit", report.commit_time);
  part("detokenize", report.detokenize_time);
  preemptions_->Increment(static_cast<double>(report.preemptions));
  for (const BlockReport& block : report.blocks) OnBlock(block, 1);
  evictions_["kv"]->Increment(static_cast<double>(report.evicted_pages));
  evictions_["checkpoint"]->Increment(static_cast<double>(report.evicted_checkpoints));
  batch_size_->Observe(static_cast<double>(report.sequences));
  batch_tokens_->Observe(static_cast<double>(report.prefill_rows + report.refed_rows + report.verify_rows));
  bool speculated = false;
  for (const DecodedRound& decoded : report.rounds) {
    OnRound(decoded);
    speculated |= decoded.round.drafted > 0;
  }
  if (speculated) {
    part("draft", report.draft_time);
    draft_seconds_->Increment(absl::ToDoubleSeconds(report.draft_time));
    verify_seconds_->Increment(absl::ToDoubleSeconds(report.forward_time));
  }
  for (const std::string& reason : report.not_speculated) {
    prometheus::Counter*& counter = skipped_[reason];
    if (counter == nullptr) counter = &registry_.Counter(metrics::kSpecSkipped, {{"reason", reason}});
    counter->Increment();
  }
}

}  // namespace dflash
