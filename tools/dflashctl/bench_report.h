// What `dflashctl bench` measured: paired runs without and with speculation.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace dflash::ctl {

// One generation as the client and the server timed it.
struct BenchSample {
  int64_t tokens = 0;
  int64_t rounds = 0;  // decode rounds, drafted or not
  int64_t drafted = 0;
  int64_t accepted = 0;
  double first_token_seconds = 0;  // call to first chunk
  double total_seconds = 0;        // call to end of stream
  double decode_seconds = 0;       // first token to last, from the server
  double draft_seconds = 0;
  double verify_seconds = 0;
};

// One arm: the same requests with one way to speculate.
struct BenchArm {
  std::string name;  // "off", "dflash"
  std::vector<BenchSample> samples;
  double wall_seconds = 0;  // summed over the runs of this arm
};

// The smallest value such that at least `fraction` of the values are no larger (nearest rank); 0 for no
// values. 0 < fraction <= 1.
double Percentile(std::vector<double> values, double fraction);

// Figures of one arm.
struct BenchFigures {
  int64_t requests = 0;
  int64_t tokens = 0;
  double tokens_per_second = 0;         // all tokens by wall time, prefill and concurrency included
  double decode_tokens_per_second = 0;  // per request: tokens after the first by decode time, median
  double tokens_per_round = 0;
  double acceptance = 0;  // accepted of drafted
  double first_token_p50_seconds = 0, first_token_p90_seconds = 0, first_token_p99_seconds = 0;
  double draft_seconds_per_round = 0;
  double verify_seconds_per_round = 0;
};
BenchFigures Summarize(const BenchArm& arm);

// A table, one column per arm; with two arms also the ratio second to first.
std::string FormatTable(const std::vector<BenchArm>& arms);
// One JSON object: {"arms": [{"name": ..., "tokens_per_second": ..., ...}]}.
std::string FormatJson(const std::vector<BenchArm>& arms);

}  // namespace dflash::ctl
