// Every metric that dflashd exports, defined once: name, type, help, labels and buckets. Coordinator and
// worker make their series from this table, the exporter accepts nothing else, and dashboards and alerts are
// checked against it. Names follow the de-facto schema of speculative decoding metrics (drafts, draft tokens,
// accepted tokens, accepted per position) under our prefix.
//
// The coordinator is the only exporter. It adds the label `model` to every series, and `group` to every
// series of a worker group.
#pragma once

#include <array>
#include <span>
#include <string_view>

namespace dflash {

enum class MetricType { kCounter, kGauge, kHistogram };

// Whose it is: the whole server's, or one worker group's (label `group`).
enum class MetricScope { kServer, kGroup };

struct MetricInfo {
  std::string_view name;
  MetricType type;
  MetricScope scope;
  std::string_view help;
  std::array<std::string_view, 8> labels = {};  // in use up to the first empty one; without model and group
  std::span<const double> buckets = {};         // upper bounds of a histogram, +Inf left out
};

namespace metrics {

// Time to first token: from received to first token ready to send.
inline constexpr double kFirstTokenBuckets[] = {.005, .01, .02, .03, .05, .075, .1, .15, .2, .3, .5,
                                                .75,  1,   1.5, 2.5, 5,   7.5,  10, 20,  40, 80, 160};
// Per token and per step: a fast target needs milliseconds, so buckets start at half of one.
inline constexpr double kStepBuckets[] = {.0005, .001, .0015, .002, .003, .004, .005, .0075, .01, .0125, .015,
                                          .02,   .025, .03,   .04,  .05,  .075, .1,   .25,   .5,  1,     2.5};
inline constexpr double kRequestBuckets[] = {.001, .005, .01, .05, .1, .25, .5,  1,   2.5,
                                             5,    10,   20,  40,  80, 160, 320, 640, 1280};
inline constexpr double kTokenCountBuckets[] = {1,    2,    5,    10,    20,    50,    100,    200,   500,
                                                1000, 2000, 5000, 10000, 20000, 50000, 131072, 262144};
inline constexpr double kBatchSizeBuckets[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512};
inline constexpr double kBatchTokensBuckets[] = {1,   2,   4,    8,    16,   32,   64,   128,
                                                 256, 512, 1024, 2048, 4096, 8192, 16384};
inline constexpr double kAcceptedBuckets[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};

// Requests.
inline constexpr MetricInfo kRequests{"dflashd_requests_total",
                                      MetricType::kCounter,
                                      MetricScope::kServer,
                                      "Generation requests by how they ended (stop, length, cancelled, "
                                      "deadline, rejected, error); each is counted "
                                      "once.",
                                      {"api", "outcome"}};
inline constexpr MetricInfo kRequestsRejected{
    "dflashd_requests_rejected_total",
    MetricType::kCounter,
    MetricScope::kServer,
    "Generation requests that were refused or cut off by the server, by reason; their outcome is rejected.",
    {"reason"}};
inline constexpr MetricInfo kRequestsRunning{"dflashd_requests_running", MetricType::kGauge,
                                             MetricScope::kServer, "Requests in a worker group."};
inline constexpr MetricInfo kRequestsWaiting{"dflashd_requests_waiting", MetricType::kGauge,
                                             MetricScope::kServer,
                                             "Requests in the queue, running ones not counted."};
inline constexpr MetricInfo kWaitingPromptTokens{"dflashd_waiting_prompt_tokens", MetricType::kGauge,
                                                 MetricScope::kServer,
                                                 "Prompt tokens of the requests in the queue."};
inline constexpr MetricInfo kQueueLimit{"dflashd_queue_limit",
                                        MetricType::kGauge,
                                        MetricScope::kServer,
                                        "Bound of the queue by dimension (requests, tokens).",
                                        {"dimension"}};
inline constexpr MetricInfo kOldestWaitingSeconds{
    "dflashd_oldest_waiting_seconds", MetricType::kGauge, MetricScope::kServer,
    "Age of the oldest request in the queue; 0 when it is empty."};
inline constexpr MetricInfo kTimeToFirstToken{
    "dflashd_time_to_first_token_seconds",
    MetricType::kHistogram,
    MetricScope::kServer,
    "From request received to first token ready to send, by prefix cache outcome (hit, partial, miss).",
    {"cache"},
    kFirstTokenBuckets};
inline constexpr MetricInfo kStepInterval{
    "dflashd_step_interval_seconds",
    MetricType::kHistogram,
    MetricScope::kServer,
    "Gap between two consecutive outputs of one request, each of one or more tokens.",
    {},
    kStepBuckets};
inline constexpr MetricInfo kTimePerOutputToken{
    "dflashd_time_per_output_token_seconds",
    MetricType::kHistogram,
    MetricScope::kServer,
    "Gap between two consecutive outputs divided by the tokens of the second, observed once per token.",
    {},
    kStepBuckets};
inline constexpr MetricInfo kRequestTimePerOutputToken{
    "dflashd_request_time_per_output_token_seconds",
    MetricType::kHistogram,
    MetricScope::kServer,
    "Mean time per output token of a finished request, the first token left out.",
    {},
    kStepBuckets};
inline constexpr MetricInfo kRequestQueueSeconds{"dflashd_request_queue_seconds",
                                                 MetricType::kHistogram,
                                                 MetricScope::kServer,
                                                 "From request received to handed to a worker group.",
                                                 {},
                                                 kRequestBuckets};
inline constexpr MetricInfo kRequestPrefillSeconds{"dflashd_request_prefill_seconds",
                                                   MetricType::kHistogram,
                                                   MetricScope::kServer,
                                                   "First prefill step to first token of a finished request.",
                                                   {},
                                                   kRequestBuckets};
inline constexpr MetricInfo kRequestDecodeSeconds{"dflashd_request_decode_seconds",
                                                  MetricType::kHistogram,
                                                  MetricScope::kServer,
                                                  "First token to last of a finished request.",
                                                  {},
                                                  kRequestBuckets};
inline constexpr MetricInfo kRequestSeconds{"dflashd_request_seconds",
                                            MetricType::kHistogram,
                                            MetricScope::kServer,
                                            "From received to ended, requests that ended with an output.",
                                            {},
                                            kRequestBuckets};
inline constexpr MetricInfo kRequestPromptTokens{"dflashd_request_prompt_tokens",
                                                 MetricType::kHistogram,
                                                 MetricScope::kServer,
                                                 "Prompt tokens of a started request.",
                                                 {},
                                                 kTokenCountBuckets};
inline constexpr MetricInfo kRequestOutputTokens{"dflashd_request_output_tokens",
                                                 MetricType::kHistogram,
                                                 MetricScope::kServer,
                                                 "Output tokens of a finished request.",
                                                 {},
                                                 kTokenCountBuckets};
inline constexpr MetricInfo kPromptTokens{"dflashd_prompt_tokens_total",
                                          MetricType::kCounter,
                                          MetricScope::kServer,
                                          "Prompt tokens of started requests by source (computed, cached).",
                                          {"source"}};
inline constexpr MetricInfo kGeneratedTokens{"dflashd_generated_tokens_total", MetricType::kCounter,
                                             MetricScope::kServer, "Output tokens of all requests."};

// Steps of a group.
inline constexpr MetricInfo kEngineSteps{
    "dflashd_engine_steps_total",
    MetricType::kCounter,
    MetricScope::kGroup,
    "Steps by kind (prefill, verify, mixed: rows of which phase it had) and execution (graph, eager).",
    {"kind", "exec"}};
inline constexpr MetricInfo kEngineStepSeconds{"dflashd_engine_step_seconds",
                                               MetricType::kHistogram,
                                               MetricScope::kGroup,
                                               "Wall time of a step by kind.",
                                               {"kind"},
                                               kStepBuckets};
inline constexpr MetricInfo kEngineStepPartSeconds{
    "dflashd_engine_step_part_seconds",
    MetricType::kHistogram,
    MetricScope::kGroup,
    "Wall time of the parts of a step (schedule, draft, verify: the target's forward pass, sample, commit, "
    "detokenize).",
    {"part"},
    kStepBuckets};
inline constexpr MetricInfo kBatchSize{
    "dflashd_batch_size", MetricType::kHistogram, MetricScope::kGroup, "Sequences with rows in a step.", {},
    kBatchSizeBuckets};
inline constexpr MetricInfo kBatchTokens{
    "dflashd_batch_tokens", MetricType::kHistogram, MetricScope::kGroup, "Rows in a step.", {},
    kBatchTokensBuckets};
inline constexpr MetricInfo kPreemptions{
    "dflashd_preemptions_total",
    MetricType::kCounter,
    MetricScope::kGroup,
    "Running requests that gave their state back to be resumed later, by what was short (pages).",
    {"reason"}};
inline constexpr MetricInfo kCacheUsage{
    "dflashd_cache_usage_ratio",
    MetricType::kGauge,
    MetricScope::kGroup,
    "Share of a pool in use (kv: pages of attention and drafter context; "
    "state: slots of recurrent state; checkpoint: copies of them for cached "
    "prefixes).",
    {"pool"}};
inline constexpr MetricInfo kCacheBlocks{
    "dflashd_cache_blocks",
    MetricType::kGauge,
    MetricScope::kGroup,
    "Blocks of a pool by state (free, used, evictable: cached prefixes that "
    "no request uses).",
    {"pool", "state"}};
inline constexpr MetricInfo kPrefixCacheQueriedTokens{
    "dflashd_prefix_cache_queried_tokens_total", MetricType::kCounter, MetricScope::kGroup,
    "Prompt tokens of requests that looked into the prefix cache when they got their slot."};
inline constexpr MetricInfo kPrefixCacheHitTokens{
    "dflashd_prefix_cache_hit_tokens_total",
    MetricType::kCounter,
    MetricScope::kGroup,
    "Of them, found by pool (target_full: attention keys and values, draft_full: drafter context, gdn_state: "
    "recurrent state; effective: the least of these, which the request began with).",
    {"pool"}};
inline constexpr MetricInfo kPrefixCacheLimited{
    "dflashd_prefix_cache_limited_total",
    MetricType::kCounter,
    MetricScope::kGroup,
    "Requests that could have begun further on, had this pool had as much as the others.",
    {"pool"}};

inline constexpr MetricInfo kPrefixCacheEvictions{"dflashd_prefix_cache_evictions_total",
                                                  MetricType::kCounter,
                                                  MetricScope::kGroup,
                                                  "What the prefix cache gave up because there was no room "
                                                  "(kv: pages of attention and drafter context, checkpoint: "
                                                  "copies of recurrent state).",
                                                  {"pool"}};

// Speculation.
inline constexpr MetricInfo kSpecBlockRounds{
    "dflashd_spec_decode_block_rounds_total",
    MetricType::kCounter,
    MetricScope::kGroup,
    "Decode rounds of the group by the rows of a block, anchor "
    "included (1: plain decoding), and why it had so many "
    "(whole: blocks are never cut, row_limit: --max-verify-rows, "
    "no_drafts: no request that speculates, asked: a request wants whole blocks, best: most "
    "tokens a second, probe: to measure another length again).",
    {"block_rows", "reason"}};
inline constexpr MetricInfo kSpecDrafts{"dflashd_spec_decode_num_drafts_total",
                                        MetricType::kCounter,
                                        MetricScope::kGroup,
                                        "Rounds with at least one draft, one per sequence per verification.",
                                        {"method"}};
inline constexpr MetricInfo kSpecDraftTokens{"dflashd_spec_decode_num_draft_tokens_total",
                                             MetricType::kCounter,
                                             MetricScope::kGroup,
                                             "Drafts sent to verification.",
                                             {"method"}};
inline constexpr MetricInfo kSpecCutDraftTokens{
    "dflashd_spec_decode_num_cut_draft_tokens_total",
    MetricType::kCounter,
    MetricScope::kGroup,
    "Drafts proposed and not sent to verification: their drafter "
    "thought too little of them (CPU backend, blocks by load).",
    {"method"}};
inline constexpr MetricInfo kSpecAcceptedTokens{
    "dflashd_spec_decode_num_accepted_tokens_total",
    MetricType::kCounter,
    MetricScope::kGroup,
    "Drafts accepted, without the bonus or correction token of each round.",
    {"method"}};
inline constexpr MetricInfo kSpecDraftTokensPerPosition{
    "dflashd_spec_decode_num_draft_tokens_per_pos_total",
    MetricType::kCounter,
    MetricScope::kGroup,
    "Drafts sent to verification by position in the draft block, from 0: denominator of the acceptance per "
    "position when blocks are cut short.",
    {"method", "position"}};
inline constexpr MetricInfo kSpecAcceptedTokensPerPosition{
    "dflashd_spec_decode_num_accepted_tokens_per_pos_total",
    MetricType::kCounter,
    MetricScope::kGroup,
    "Drafts accepted by position in the draft block, from 0, without the bonus token.",
    {"method", "position"}};
inline constexpr MetricInfo kSpecAcceptedPerStep{"dflashd_spec_decode_accepted_per_step",
                                                 MetricType::kHistogram,
                                                 MetricScope::kGroup,
                                                 "Accepted drafts per round, without the bonus token.",
                                                 {"method", "constrained"},
                                                 kAcceptedBuckets};
inline constexpr MetricInfo kSpecSkipped{
    "dflashd_spec_decode_skipped_total",
    MetricType::kCounter,
    MetricScope::kGroup,
    "Decode rounds of a sequence without drafts, by reason (auto_batch: with so many sequences plain "
    "decoding "
    "is faster, auto_low_accept: it is for one alone, as few drafts are accepted; "
    "disabled_request, disabled_server, near_max_len).",
    {"reason"}};
inline constexpr MetricInfo kSpecEnabled{"dflashd_spec_decode_enabled",
                                         MetricType::kGauge,
                                         MetricScope::kGroup,
                                         "1 when the method is in force for requests that do not choose.",
                                         {"method"}};
inline constexpr MetricInfo kSpecDraftSeconds{"dflashd_spec_decode_draft_seconds_total",
                                              MetricType::kCounter,
                                              MetricScope::kGroup,
                                              "Time spent in draft passes.",
                                              {"method"}};
inline constexpr MetricInfo kSpecVerifySeconds{
    "dflashd_spec_decode_verify_seconds_total",
    MetricType::kCounter,
    MetricScope::kGroup,
    "Time spent in the target's passes of steps that verified drafts.",
    {"method"}};

inline constexpr MetricInfo kSpecConfig{"dflashd_spec_decode_config_info",
                                        MetricType::kGauge,
                                        MetricScope::kGroup,
                                        "Always 1 when a drafter is loaded; how it was read: layers tapped, "
                                        "mask and window of its layers, mask token, "
                                        "revisions, and all of it as the line that the log shows.",
                                        {"method", "block_size", "taps", "draft_layers", "mask_token_id",
                                         "target_revision", "drafter_revision", "contract"}};

// Health of speculation: what tells hard text from a broken integration (docs/diagnosing-acceptance.md).
inline constexpr MetricInfo kSpecPredictedTokensPerPosition{
    "dflashd_spec_decode_predicted_tokens_per_pos_total",
    MetricType::kCounter,
    MetricScope::kGroup,
    "Sum of the survival that the drafter's own probabilities predict, by position in the draft block, from "
    "0: "
    "to be compared with the accepted ones.",
    {"method", "position"}};
inline constexpr MetricInfo kSpecConfidenceDrafts{
    "dflashd_spec_decode_confidence_drafts_total",
    MetricType::kCounter,
    MetricScope::kGroup,
    "Drafts that verification reached, all before them being accepted, by the lower bound of the drafter's "
    "probability (0.0, 0.1, ... 0.9).",
    {"method", "confidence"}};
inline constexpr MetricInfo kSpecConfidenceAccepted{"dflashd_spec_decode_confidence_accepted_total",
                                                    MetricType::kCounter,
                                                    MetricScope::kGroup,
                                                    "Of them, accepted.",
                                                    {"method", "confidence"}};
inline constexpr MetricInfo kSpecContentDrafts{
    "dflashd_spec_decode_content_drafts_total",
    MetricType::kCounter,
    MetricScope::kGroup,
    "Rounds with at least one draft by what the anchor stands in (thinking, tool, code, text).",
    {"method", "content"}};
inline constexpr MetricInfo kSpecContentDraftTokens{"dflashd_spec_decode_content_draft_tokens_total",
                                                    MetricType::kCounter,
                                                    MetricScope::kGroup,
                                                    "Drafts sent to verification in these rounds.",
                                                    {"method", "content"}};
inline constexpr MetricInfo kSpecContentAcceptedTokens{"dflashd_spec_decode_content_accepted_tokens_total",
                                                       MetricType::kCounter,
                                                       MetricScope::kGroup,
                                                       "Drafts accepted in these rounds.",
                                                       {"method", "content"}};
inline constexpr MetricInfo kSpecContentFirstAccepted{"dflashd_spec_decode_content_first_accepted_total",
                                                      MetricType::kCounter,
                                                      MetricScope::kGroup,
                                                      "Of these rounds, whose first draft was accepted.",
                                                      {"method", "content"}};
inline constexpr MetricInfo kSpecOriginDrafts{
    "dflashd_spec_decode_origin_drafts_total",
    MetricType::kCounter,
    MetricScope::kGroup,
    "Rounds with at least one draft by where the sequence's stores come from (cold: its own prompt, prefix: "
    "begun with a cached prefix, resumed: computed again after a preemption).",
    {"method", "origin"}};
inline constexpr MetricInfo kSpecOriginAcceptedTokens{"dflashd_spec_decode_origin_accepted_tokens_total",
                                                      MetricType::kCounter,
                                                      MetricScope::kGroup,
                                                      "Drafts accepted in these rounds.",
                                                      {"method", "origin"}};
inline constexpr MetricInfo kSpecOriginFirstAccepted{"dflashd_spec_decode_origin_first_accepted_total",
                                                     MetricType::kCounter,
                                                     MetricScope::kGroup,
                                                     "Of these rounds, whose first draft was accepted.",
                                                     {"method", "origin"}};
inline constexpr MetricInfo kSpecContextTokens{
    "dflashd_spec_decode_context_tokens_total",
    MetricType::kCounter,
    MetricScope::kGroup,
    "Positions before the anchors of rounds, all of which belong into the drafter's context.",
    {"method"}};
inline constexpr MetricInfo kSpecContextMissingTokens{"dflashd_spec_decode_context_missing_tokens_total",
                                                      MetricType::kCounter,
                                                      MetricScope::kGroup,
                                                      "Of them, those that were not in it; stays 0.",
                                                      {"method"}};
inline constexpr MetricInfo kSpecCalibrationGap{"dflashd_spec_decode_calibration_gap",
                                                MetricType::kGauge,
                                                MetricScope::kGroup,
                                                "Mean probability of first drafts less the share that was "
                                                "accepted, last 2048 rounds at temperatures up to "
                                                "1.",
                                                {"method"}};
inline constexpr MetricInfo kSpecFirstDraftAcceptance{"dflashd_spec_decode_first_draft_acceptance",
                                                      MetricType::kGauge,
                                                      MetricScope::kGroup,
                                                      "Share of first drafts accepted, the same rounds.",
                                                      {"method"}};
inline constexpr MetricInfo kSpecHealthRounds{"dflashd_spec_decode_health_rounds",
                                              MetricType::kGauge,
                                              MetricScope::kGroup,
                                              "How many rounds that verdict rests on.",
                                              {"method"}};
inline constexpr MetricInfo kSpecHealth{"dflashd_spec_decode_health",
                                        MetricType::kGauge,
                                        MetricScope::kGroup,
                                        "1 for the verdict on these rounds (unknown, healthy, hard_text, "
                                        "broken, refused) and its reason, else 0.",
                                        {"method", "verdict", "reason"}};
inline constexpr MetricInfo kSpecSelfTest{
    "dflashd_spec_decode_self_test",
    MetricType::kGauge,
    MetricScope::kGroup,
    "1 for how the self-test at start ended (passed, failed, overridden: failed and drafts all the same, "
    "skipped), else 0.",
    {"method", "result"}};

// Processes.
inline constexpr MetricInfo kReady{"dflashd_ready", MetricType::kGauge, MetricScope::kServer,
                                   "1 when new requests are taken."};
inline constexpr MetricInfo kDraining{"dflashd_draining", MetricType::kGauge, MetricScope::kServer,
                                      "1 when the server is going down and takes no new requests."};
inline constexpr MetricInfo kWorkerUp{"dflashd_worker_up",
                                      MetricType::kGauge,
                                      MetricScope::kGroup,
                                      "1 while the process of a rank lives and answers.",
                                      {"rank"}};
inline constexpr MetricInfo kWorkerHeartbeatAge{"dflashd_worker_heartbeat_age_seconds",
                                                MetricType::kGauge,
                                                MetricScope::kGroup,
                                                "Time since a rank was last heard of.",
                                                {"rank"}};
inline constexpr MetricInfo kGroupState{"dflashd_group_state",
                                        MetricType::kGauge,
                                        MetricScope::kGroup,
                                        "1 for the state that a worker group is in (loading, ready, lost), "
                                        "0 for the others.",
                                        {"state"}};
inline constexpr MetricInfo kGroupEpoch{"dflashd_group_epoch", MetricType::kGauge, MetricScope::kGroup,
                                        "Counts the lives of a worker group; above 1 it was started again."};
inline constexpr MetricInfo kGroupReforms{"dflashd_group_reforms_total",
                                          MetricType::kCounter,
                                          MetricScope::kGroup,
                                          "Lives of a worker group that ended unasked, by what ended them.",
                                          {"cause"}};
inline constexpr MetricInfo kBuildInfo{"dflashd_build_info",
                                       MetricType::kGauge,
                                       MetricScope::kServer,
                                       "Always 1; the version of this server.",
                                       {"version"}};
inline constexpr MetricInfo kGroupInfo{"dflashd_group_info",
                                       MetricType::kGauge,
                                       MetricScope::kGroup,
                                       "Always 1; what a worker group runs on.",
                                       {"backend"}};
inline constexpr MetricInfo kMemoryBytes{
    "dflashd_memory_bytes",
    MetricType::kGauge,
    MetricScope::kGroup,
    "Device memory of rank 0 by pool, as planned before loading and then taken (weights, kv, state, "
    "delta_records, conv_state, checkpoint, scratch, draft_weights, draft_kv, draft_scratch).",
    {"kind"}};
inline constexpr MetricInfo kCertificateExpiry{
    "dflashd_tls_certificate_expiry_timestamp_seconds",
    MetricType::kGauge,
    MetricScope::kServer,
    "When a certificate of the listening ports ends, as seconds of the Unix epoch, by what it is for "
    "(server, client_ca); there is none without TLS.",
    {"file"}};
inline constexpr MetricInfo kTraceSpans{"dflashd_trace_spans_total",
                                        MetricType::kCounter,
                                        MetricScope::kServer,
                                        "Spans for the trace collector by what became of them (exported, "
                                        "failed: the collector did not take them, "
                                        "queue_full); there is none without --otlp-endpoint.",
                                        {"outcome"}};
inline constexpr MetricInfo kGrpcHandled{"dflashd_grpc_server_handled_total",
                                         MetricType::kCounter,
                                         MetricScope::kServer,
                                         "Calls of the public API by result.",
                                         {"service", "method", "code"}};

inline constexpr const MetricInfo* kAll[] = {&kRequests,
                                             &kRequestsRejected,
                                             &kRequestsRunning,
                                             &kRequestsWaiting,
                                             &kWaitingPromptTokens,
                                             &kQueueLimit,
                                             &kOldestWaitingSeconds,
                                             &kTimeToFirstToken,
                                             &kStepInterval,
                                             &kTimePerOutputToken,
                                             &kRequestTimePerOutputToken,
                                             &kRequestQueueSeconds,
                                             &kRequestPrefillSeconds,
                                             &kRequestDecodeSeconds,
                                             &kRequestSeconds,
                                             &kRequestPromptTokens,
                                             &kRequestOutputTokens,
                                             &kPromptTokens,
                                             &kGeneratedTokens,
                                             &kEngineSteps,
                                             &kEngineStepSeconds,
                                             &kEngineStepPartSeconds,
                                             &kBatchSize,
                                             &kBatchTokens,
                                             &kPreemptions,
                                             &kCacheUsage,
                                             &kCacheBlocks,
                                             &kPrefixCacheQueriedTokens,
                                             &kPrefixCacheHitTokens,
                                             &kPrefixCacheLimited,
                                             &kPrefixCacheEvictions,
                                             &kSpecBlockRounds,
                                             &kSpecDrafts,
                                             &kSpecDraftTokens,
                                             &kSpecCutDraftTokens,
                                             &kSpecAcceptedTokens,
                                             &kSpecDraftTokensPerPosition,
                                             &kSpecAcceptedTokensPerPosition,
                                             &kSpecAcceptedPerStep,
                                             &kSpecSkipped,
                                             &kSpecEnabled,
                                             &kSpecDraftSeconds,
                                             &kSpecVerifySeconds,
                                             &kSpecConfig,
                                             &kSpecPredictedTokensPerPosition,
                                             &kSpecConfidenceDrafts,
                                             &kSpecConfidenceAccepted,
                                             &kSpecContentDrafts,
                                             &kSpecContentDraftTokens,
                                             &kSpecContentAcceptedTokens,
                                             &kSpecContentFirstAccepted,
                                             &kSpecOriginDrafts,
                                             &kSpecOriginAcceptedTokens,
                                             &kSpecOriginFirstAccepted,
                                             &kSpecContextTokens,
                                             &kSpecContextMissingTokens,
                                             &kSpecCalibrationGap,
                                             &kSpecFirstDraftAcceptance,
                                             &kSpecHealthRounds,
                                             &kSpecHealth,
                                             &kSpecSelfTest,
                                             &kReady,
                                             &kDraining,
                                             &kWorkerUp,
                                             &kWorkerHeartbeatAge,
                                             &kGroupState,
                                             &kGroupEpoch,
                                             &kGroupReforms,
                                             &kBuildInfo,
                                             &kGroupInfo,
                                             &kMemoryBytes,
                                             &kCertificateExpiry,
                                             &kTraceSpans,
                                             &kGrpcHandled};

// The table entry of that name, or null.
constexpr const MetricInfo* Find(std::string_view name) {
  for (const MetricInfo* info : kAll) {
    if (info->name == name) return info;
  }
  return nullptr;
}

}  // namespace metrics
}  // namespace dflash
