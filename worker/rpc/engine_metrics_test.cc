#include "worker/rpc/engine_metrics.h"

#include <map>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::ElementsAre;

// Every sample by "name{label=value,...}"; histograms as _count and _sum.
std::map<std::string, double> Samples(const EngineMetrics& metrics) {
  std::map<std::string, double> samples;
  for (const auto& family : metrics.Collect()) {
    EXPECT_NE(metrics::Find(family.name), nullptr) << family.name;
    for (const auto& metric : family.metric) {
      std::string labels;
      for (const auto& label : metric.label) labels += label.name + "=" + label.value + ",";
      const std::string key = family.name.substr(sizeof("dflashd_") - 1) + "{" + labels + "}";
      if (family.type == prometheus::MetricType::Histogram) {
        samples[key + "_count"] = static_cast<double>(metric.histogram.sample_count);
        samples[key + "_sum"] = metric.histogram.sample_sum;
      } else {
        samples[key] =
            family.type == prometheus::MetricType::Counter ? metric.counter.value : metric.gauge.value;
      }
    }
  }
  return samples;
}

EngineMetrics::Options WithDrafter(int64_t max_drafts) {
  return {.backend = "cpu", .max_drafts = max_drafts, .speculate_by_default = true, .config = {}};
}

TEST(EngineMetrics, SeriesExistBeforeTheFirstStep) {
  EngineMetrics metrics(WithDrafter(15));
  const auto samples = Samples(metrics);
  EXPECT_EQ(samples.at("spec_decode_num_drafts_total{method=dflash,}"), 0);
  EXPECT_EQ(samples.at("spec_decode_num_accepted_tokens_per_pos_total{method=dflash,position=14,}"), 0);
  EXPECT_EQ(samples.count("spec_decode_num_accepted_tokens_per_pos_total{method=dflash,position=15,}"), 0u);
  EXPECT_EQ(samples.at("engine_steps_total{exec=eager,kind=verify,}"), 0);
  EXPECT_EQ(samples.at("spec_decode_enabled{method=dflash,}"), 1);
}

// Rounds: 15 drafted and 7 accepted, 15 and 0, one cut to 2 of which both are accepted, one without drafts.
TEST(EngineMetrics, CountsRoundsWithoutTheBonusToken) {
  EngineMetrics metrics(WithDrafter(15));
  StepReport report;
  report.verify_rows = 36;
  report.sequences = 4;
  report.rounds = {{.round = {15, 7}}, {.round = {15, 0}}, {.round = {2, 2}, .cut_drafts = 13}, {.round = {0, 0}}};
  report.not_speculated = {"disabled_request"};
  report.draft_time = absl::Milliseconds(2);
  report.forward_time = absl::Milliseconds(8);
  report.total_time = absl::Milliseconds(12);
  metrics.OnStep(report, {});
  const auto samples = Samples(metrics);
  EXPECT_EQ(samples.at("spec_decode_num_drafts_total{method=dflash,}"), 3);
  EXPECT_EQ(samples.at("spec_decode_num_draft_tokens_total{method=dflash,}"), 32);
  EXPECT_EQ(samples.at("spec_decode_num_cut_draft_tokens_total{method=dflash,}"), 13);
  EXPECT_EQ(samples.at("spec_decode_num_accepted_tokens_total{method=dflash,}"), 9);
  double accepted = 0;
  double drafted = 0;
  for (int position = 0; position < 15; ++position) {
    const std::string labels = "{method=dflash,position=" + std::to_string(position) + ",}";
    accepted += samples.at("spec_decode_num_accepted_tokens_per_pos_total" + labels);
    drafted += samples.at("spec_decode_num_draft_tokens_per_pos_total" + labels);
  }
  EXPECT_EQ(accepted, 9) << "sum over positions = accepted tokens";
  EXPECT_EQ(drafted, 32);
  EXPECT_EQ(samples.at("spec_decode_num_accepted_tokens_per_pos_total{method=dflash,position=0,}"), 2);
  EXPECT_EQ(samples.at("spec_decode_num_accepted_tokens_per_pos_total{method=dflash,position=2,}"), 1);
  EXPECT_EQ(samples.at("spec_decode_num_draft_tokens_per_pos_total{method=dflash,position=1,}"), 3);
  EXPECT_EQ(samples.at("spec_decode_num_draft_tokens_per_pos_total{method=dflash,position=2,}"), 2)
      << "a position that was not drafted is not in the denominator";
  EXPECT_EQ(samples.at("spec_decode_accepted_per_step{constrained=no,method=dflash,}_count"), 3);
  EXPECT_EQ(samples.at("spec_decode_accepted_per_step{constrained=no,method=dflash,}_sum"), 9);
  EXPECT_EQ(samples.at("spec_decode_skipped_total{reason=disabled_request,}"), 1);
  EXPECT_DOUBLE_EQ(samples.at("spec_decode_draft_seconds_total{method=dflash,}"), .002);
  EXPECT_DOUBLE_EQ(samples.at("spec_decode_verify_seconds_total{method=dflash,}"), .008);
  EXPECT_EQ(samples.at("engine_steps_total{exec=eager,kind=verify,}"), 1);
  EXPECT_DOUBLE_EQ(samples.at("engine_step_seconds{kind=verify,}_sum"), .012);
  EXPECT_EQ(samples.at("batch_tokens{}_sum"), 36);
  EXPECT_EQ(samples.at("batch_size{}_sum"), 4);
}

TEST(EngineMetrics, LengthsOfBlocksAndEvictions) {
  EngineMetrics metrics(WithDrafter(15));
  for (const char* rows : {"1", "4", "8", "16"}) {
    EXPECT_EQ(Samples(metrics).at("spec_decode_block_rounds_total{block_rows=" + std::string(rows) +
                                  ",reason=best,}"),
              0);
  }
  StepReport report;
  report.blocks = {{.rows = 16, .reason = BlockReason::kBest}, {.rows = 1, .reason = BlockReason::kProbe}};
  report.not_speculated = {"auto_batch"};
  report.evicted_pages = 3;
  report.evicted_checkpoints = 2;
  metrics.OnStep(report, {});
  metrics.OnStep(report, {});
  const auto samples = Samples(metrics);
  EXPECT_EQ(samples.at("spec_decode_block_rounds_total{block_rows=16,reason=best,}"), 2);
  EXPECT_EQ(samples.at("spec_decode_block_rounds_total{block_rows=1,reason=probe,}"), 2);
  EXPECT_EQ(samples.at("spec_decode_skipped_total{reason=auto_batch,}"), 2);
  EXPECT_EQ(samples.at("prefix_cache_evictions_total{pool=kv,}"), 6);
  EXPECT_EQ(samples.at("prefix_cache_evictions_total{pool=checkpoint,}"), 4);
}

// Three rounds of two drafts: both accepted, the first one, none; and one that a stop token ended.
TEST(EngineMetrics, CalibrationContentAndOrigin) {
  EngineMetrics metrics(WithDrafter(2));
  EXPECT_EQ(Samples(metrics).at("spec_decode_predicted_tokens_per_pos_total{method=dflash,position=1,}"), 0);
  StepReport report;
  report.verify_rows = 12;
  report.rounds = {
      {.round = {2, 2}, .emitted = 3, .confidences = {.5f, .5f}, .content = ContentClass::kCode},
      {.round = {2, 1}, .emitted = 2, .confidences = {1.0f, .25f}, .content = ContentClass::kCode},
      {.round = {2, 0},
       .emitted = 1,
       .confidences = {.5f, .75f},
       .origin = ContextOrigin::kPrefix,
       .context_tokens = 30,
       .context_missing = 10},
      {.round = {2, 1}, .emitted = 1, .confidences = {.25f, .75f}, .context_tokens = 40}};
  metrics.OnStep(report, {});
  const auto samples = Samples(metrics);
  const auto at = [&](const std::string& name, const std::string& labels) {
    return samples.at("spec_decode_" + name + "{" + labels + "}");
  };
  EXPECT_EQ(at("predicted_tokens_per_pos_total", "method=dflash,position=0,"), .5 + 1 + .5 + .25);
  EXPECT_EQ(at("predicted_tokens_per_pos_total", "method=dflash,position=1,"), .25 + .25 + .375)
      << "what stands behind the end of an output is not expected";
  // Reached: 0.5 0.5 | 1.0 0.25 | 0.5 | 0.25. Only what was reached can be accepted.
  EXPECT_EQ(at("confidence_drafts_total", "confidence=0.5,method=dflash,"), 3);
  EXPECT_EQ(at("confidence_accepted_total", "confidence=0.5,method=dflash,"), 2);
  EXPECT_EQ(at("confidence_drafts_total", "confidence=0.9,method=dflash,"), 1);
  EXPECT_EQ(at("confidence_accepted_total", "confidence=0.9,method=dflash,"), 1);
  EXPECT_EQ(at("confidence_drafts_total", "confidence=0.2,method=dflash,"), 2);
  EXPECT_EQ(at("confidence_accepted_total", "confidence=0.2,method=dflash,"), 1);
  EXPECT_EQ(at("confidence_drafts_total", "confidence=0.7,method=dflash,"), 0);
  EXPECT_EQ(at("content_drafts_total", "content=code,method=dflash,"), 2);
  EXPECT_EQ(at("content_draft_tokens_total", "content=code,method=dflash,"), 4);
  EXPECT_EQ(at("content_accepted_tokens_total", "content=code,method=dflash,"), 3);
  EXPECT_EQ(at("content_first_accepted_total", "content=code,method=dflash,"), 2);
  EXPECT_EQ(at("content_drafts_total", "content=text,method=dflash,"), 2);
  EXPECT_EQ(at("content_drafts_total", "content=tool,method=dflash,"), 0);
  EXPECT_EQ(at("origin_drafts_total", "method=dflash,origin=prefix,"), 1);
  EXPECT_EQ(at("origin_first_accepted_total", "method=dflash,origin=prefix,"), 0);
  EXPECT_EQ(at("origin_accepted_tokens_total", "method=dflash,origin=cold,"), 4);
  EXPECT_EQ(at("context_tokens_total", "method=dflash,"), 70);
  EXPECT_EQ(at("context_missing_tokens_total", "method=dflash,"), 10);
}

TEST(EngineMetrics, HealthIsOneVerdict) {
  EngineMetrics metrics(WithDrafter(2));
  const auto verdict = [&] {
    metrics.SetGauges({});
    std::vector<std::string> in_force;
    for (const auto& [name, value] : Samples(metrics)) {
      if (name.starts_with("spec_decode_health{") && value != 0) in_force.push_back(name);
    }
    return in_force;
  };
  EXPECT_THAT(verdict(),
              ElementsAre("spec_decode_health{method=dflash,reason=too_few_rounds,verdict=unknown,}"));
  StepReport report;
  int64_t context_tokens = 0;  // of the next round: one of the same context would not be judged
  const auto assign = [&](size_t count, const DecodedRound& round) {
    report.rounds.assign(count, round);
    for (DecodedRound& of_count : report.rounds) of_count.context_tokens = ++context_tokens;
  };
  assign(200, {.round = {2, 2}, .emitted = 3, .confidences = {.9f, .9f}});
  metrics.Mute();
  metrics.OnStep(report, {});
  metrics.Unmute();
  EXPECT_EQ(Samples(metrics).at("spec_decode_num_drafts_total{method=dflash,}"), 0) << "muted";
  metrics.OnStep(report, {});
  EXPECT_THAT(verdict(), ElementsAre("spec_decode_health{method=dflash,reason=none,verdict=healthy,}"));
  assign(400, {.round = {2, 0}, .emitted = 1, .confidences = {.9f, .9f}});
  metrics.OnStep(report, {});
  EXPECT_THAT(verdict(),
              ElementsAre("spec_decode_health{method=dflash,reason=confident_and_rejected,verdict=broken,}"));
  EXPECT_NEAR(Samples(metrics).at("spec_decode_calibration_gap{method=dflash,}"), .9 - 1.0 / 3, 1e-6);
  EXPECT_NEAR(Samples(metrics).at("spec_decode_first_draft_acceptance{method=dflash,}"), 1.0 / 3, 1e-6);
  EXPECT_EQ(Samples(metrics).at("spec_decode_health_rounds{method=dflash,}"), 600);
  metrics.SetSelfTest(SelfTestResult::kFailed);
  EXPECT_THAT(verdict(),
              ElementsAre("spec_decode_health{method=dflash,reason=self_test_failed,verdict=refused,}"));
  EXPECT_EQ(Samples(metrics).at("spec_decode_enabled{method=dflash,}"), 0);
  EXPECT_EQ(Samples(metrics).at("spec_decode_self_test{method=dflash,result=failed,}"), 1);
  EXPECT_EQ(Samples(metrics).at("spec_decode_self_test{method=dflash,result=skipped,}"), 0);
}

TEST(EngineMetrics, KindsOfSteps) {
  EngineMetrics metrics(WithDrafter(0));
  StepReport report;
  report.prefill_rows = 64;
  metrics.OnStep(report, {});
  report.verify_rows = 1;
  report.refed_rows = 7;
  report.preemptions = 2;
  metrics.OnStep(report, {});
  const auto samples = Samples(metrics);
  EXPECT_EQ(samples.at("engine_steps_total{exec=eager,kind=prefill,}"), 1);
  EXPECT_EQ(samples.at("engine_steps_total{exec=eager,kind=mixed,}"), 1);
  EXPECT_EQ(samples.at("engine_steps_total{exec=graph,kind=verify,}"), 0);
  EXPECT_EQ(samples.at("preemptions_total{reason=pages,}"), 2);
  EXPECT_EQ(samples.at("batch_tokens{}_sum"), 64 + 64 + 7 + 1);
  report.prefill_rows = 0;
  report.captured = true;
  metrics.OnStep(report, {});
  EXPECT_EQ(Samples(metrics).at("engine_steps_total{exec=graph,kind=verify,}"), 1);
  EXPECT_EQ(samples.at("spec_decode_enabled{method=dflash,}"), 0);
  EXPECT_EQ(samples.at("engine_step_part_seconds{part=draft,}_count"), 0);
}

TEST(EngineMetrics, Pools) {
  EngineMetrics metrics(WithDrafter(15));
  metrics.SetGauges({.running = 2,
                     .waiting = 0,
                     .state_slots = 8,
                     .pages_total = 100,
                     .pages_free = 45,
                     .pages_evictable = 30,
                     .checkpoints_total = 16,
                     .checkpoints_used = 12});
  const auto samples = Samples(metrics);
  EXPECT_EQ(samples.at("cache_usage_ratio{pool=kv,}"), .25);
  EXPECT_EQ(samples.at("cache_usage_ratio{pool=state,}"), .25);
  EXPECT_EQ(samples.at("cache_usage_ratio{pool=checkpoint,}"), .75);
  EXPECT_EQ(samples.at("cache_blocks{pool=kv,state=free,}"), 45);
  EXPECT_EQ(samples.at("cache_blocks{pool=kv,state=evictable,}"), 30);
  EXPECT_EQ(samples.at("cache_blocks{pool=kv,state=used,}"), 25);
  EXPECT_EQ(samples.at("cache_blocks{pool=checkpoint,state=free,}"), 4);
  EXPECT_EQ(samples.at("cache_blocks{pool=state,state=free,}"), 6);
}

// Which pool shortened a hit is visible at once.
TEST(EngineMetrics, PrefixesByPool) {
  EngineMetrics metrics(WithDrafter(15));
  EXPECT_EQ(Samples(metrics).at("prefix_cache_limited_total{pool=draft_full,}"), 0)
      << "there before it happens";
  StepReport report;
  report.prefill_rows = 64;
  report.prefixes = {{.prompt_tokens = 300, .page_tokens = 256, .state_tokens = 192, .tokens = 192},
                     {.prompt_tokens = 100, .page_tokens = 64, .state_tokens = 64, .tokens = 64},
                     {.prompt_tokens = 50, .page_tokens = 0, .state_tokens = 0, .tokens = 0}};
  metrics.OnStep(report, {});
  const auto samples = Samples(metrics);
  EXPECT_EQ(samples.at("prefix_cache_queried_tokens_total{}"), 450);
  EXPECT_EQ(samples.at("prefix_cache_hit_tokens_total{pool=target_full,}"), 320);
  EXPECT_EQ(samples.at("prefix_cache_hit_tokens_total{pool=draft_full,}"), 320);
  EXPECT_EQ(samples.at("prefix_cache_hit_tokens_total{pool=gdn_state,}"), 256);
  EXPECT_EQ(samples.at("prefix_cache_hit_tokens_total{pool=effective,}"), 256);
  EXPECT_EQ(samples.at("prefix_cache_limited_total{pool=gdn_state,}"), 1);
  EXPECT_EQ(samples.at("prefix_cache_limited_total{pool=target_full,}"), 0);
  EXPECT_EQ(samples.at("prefix_cache_limited_total{pool=draft_full,}"), 0);
  EXPECT_FALSE(
      Samples(EngineMetrics(WithDrafter(0))).contains("prefix_cache_hit_tokens_total{pool=draft_full,}"));
}

}  // namespace
}  // namespace dflash
