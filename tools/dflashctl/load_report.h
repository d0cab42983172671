// Figures of a load: percentiles (exact, nearest rank), rates, goodput.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tools/dflashctl/load_run.h"

namespace dflash::ctl {

struct Quantiles {
  int64_t count = 0;
  double mean = 0, p50 = 0, p90 = 0, p95 = 0, p99 = 0, p999 = 0, max = 0;
};
// Of values that count so many times each.
Quantiles QuantilesOf(std::vector<std::pair<double, int64_t>> values);

// What a request must keep to count for goodput; unset bounds hold always. Seconds.
struct Slo {
  std::optional<double> first_token;
  std::optional<double> per_token;  // mean over a request's tokens after the first
  std::optional<double> total;
};
bool Meets(const LoadSample& sample, const Slo& slo);

struct LoadFigures {
  LoadPhase phase;
  double wall_seconds = 0;
  // Every request is in exactly one of these.
  int64_t sent = 0, finished = 0, refused = 0, failed = 0;
  int64_t refused_without_hint = 0;
  std::map<std::string, int64_t> ends;  // "OK", or "CODE REASON"
  int64_t tokens = 0;                   // also of requests that failed later
  int64_t prompt_tokens = 0, cached_tokens = 0;
  double tokens_per_second = 0, requests_per_second = 0;  // finished ones
  double good_requests_per_second = 0, good_share = 0;    // that meet the SLO; share of those sent
  double tokens_per_round = 0, acceptance = 0;
  // Seconds. Of finished requests, except for the last two.
  Quantiles first_token, total, queue;
  Quantiles request_per_token;  // a request's mean time per token after the first
  Quantiles step_interval;      // between two chunks, each of one or more tokens
  Quantiles per_token;          // that gap over its tokens, once per token
  Quantiles refusal;            // due to refused
  Quantiles send_delay;         // due to sent: how well the load generator kept up
};
// Requests that were due in the first `warm_up` seconds, and their time, are left out.
LoadFigures Summarize(const LoadResult& result, const Slo& slo, double warm_up = 0);

// One column a phase.
std::string FormatLoadTable(const std::vector<LoadFigures>& phases);
// {"phases": [...]}
std::string FormatLoadJson(const std::vector<LoadFigures>& phases);
// One line a request, with a heading.
std::string FormatSamples(const std::vector<LoadResult>& phases);
// One line, without an end.
std::string FormatProgress(const LoadPhase& phase, const LoadProgress& progress);

}  // namespace dflash::ctl
