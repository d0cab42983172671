#include "tools/dflashctl/bench_report.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"

namespace dflash::ctl {
namespace {

double Ratio(double numerator, double denominator) { return denominator > 0 ? numerator / denominator : 0; }

struct Row {
  const char* label;
  double scale;
  int decimals;
  double BenchFigures::*figure;
};
constexpr Row kRows[] = {
    {"tokens/s, all requests", 1, 1, &BenchFigures::tokens_per_second},
    {"tokens/s, one request decoding", 1, 1, &BenchFigures::decode_tokens_per_second},
    {"tokens per round", 1, 3, &BenchFigures::tokens_per_round},
    {"accepted share of drafts", 1, 3, &BenchFigures::acceptance},
    {"first token p50, ms", 1e3, 1, &BenchFigures::first_token_p50_seconds},
    {"first token p90, ms", 1e3, 1, &BenchFigures::first_token_p90_seconds},
    {"first token p99, ms", 1e3, 1, &BenchFigures::first_token_p99_seconds},
    {"draft, ms per round", 1e3, 3, &BenchFigures::draft_seconds_per_round},
    {"verify, ms per round", 1e3, 3, &BenchFigures::verify_seconds_per_round},
};

}  // namespace

double Percentile(std::vector<double> values, double fraction) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const auto rank = static_cast<size_t>(std::ceil(fraction * static_cast<double>(values.size())));
  return values[std::clamp<size_t>(rank, 1, values.size()) - 1];
}

BenchFigures Summarize(const BenchArm& arm) {
  BenchFigures figures;
  std::vector<double> first_token, decode_speed;
  int64_t rounds = 0, drafted = 0, accepted = 0;
  double draft_seconds = 0, verify_seconds = 0;
  for (const BenchSample& sample : arm.samples) {
    ++figures.requests;
    figures.tokens += sample.tokens;
    rounds += sample.rounds;
    drafted += sample.drafted;
    accepted += sample.accepted;
    draft_seconds += sample.draft_seconds;
    verify_seconds += sample.verify_seconds;
    first_token.push_back(sample.first_token_seconds);
    if (sample.tokens > 1 && sample.decode_seconds > 0) {
      decode_speed.push_back(static_cast<double>(sample.tokens - 1) / sample.decode_seconds);
    }
  }
  const auto round_count = static_cast<double>(rounds);
  figures.tokens_per_second = Ratio(static_cast<double>(figures.tokens), arm.wall_seconds);
  figures.decode_tokens_per_second = Percentile(decode_speed, 0.5);
  figures.tokens_per_round = rounds > 0 ? 1 + static_cast<double>(accepted) / round_count : 0;
  figures.acceptance = Ratio(static_cast<double>(accepted), static_cast<double>(drafted));
  figures.first_token_p50_seconds = Percentile(first_token, 0.5);
  figures.first_token_p90_seconds = Percentile(first_token, 0.9);
  figures.first_token_p99_seconds = Percentile(first_token, 0.99);
  figures.draft_seconds_per_round = Ratio(draft_seconds, round_count);
  figures.verify_seconds_per_round = Ratio(verify_seconds, round_count);
  return figures;
}

std::string FormatTable(const std::vector<BenchArm>& arms) {
  std::vector<BenchFigures> figures;
  std::string text = absl::StrFormat("%-32s", "speculation");
  for (const BenchArm& arm : arms) {
    figures.push_back(Summarize(arm));
    absl::StrAppend(&text, absl::StrFormat("%12s", arm.name));
  }
  if (arms.size() == 2) absl::StrAppend(&text, absl::StrFormat("%12s", "ratio"));
  absl::StrAppend(&text, absl::StrFormat("\n%-32s", "requests"));
  for (const BenchFigures& f : figures) absl::StrAppend(&text, absl::StrFormat("%12d", f.requests));
  absl::StrAppend(&text, absl::StrFormat("\n%-32s", "tokens"));
  for (const BenchFigures& f : figures) absl::StrAppend(&text, absl::StrFormat("%12d", f.tokens));
  absl::StrAppend(&text, "\n");
  for (const Row& row : kRows) {
    absl::StrAppend(&text, absl::StrFormat("%-32s", row.label));
    for (const BenchFigures& f : figures) {
      absl::StrAppend(&text, absl::StrFormat("%12.*f", row.decimals, f.*row.figure * row.scale));
    }
    if (figures.size() == 2 && figures[0].*row.figure > 0) {
      absl::StrAppend(&text, absl::StrFormat("%12.2f", figures[1].*row.figure / figures[0].*row.figure));
    }
    absl::StrAppend(&text, "\n");
  }
  return text;
}

std::string FormatJson(const std::vector<BenchArm>& arms) {
  nlohmann::ordered_json json;
  json["arms"] = nlohmann::ordered_json::array();
  for (const BenchArm& arm : arms) {
    const BenchFigures f = Summarize(arm);
    json["arms"].push_back({{"name", arm.name},
                            {"requests", f.requests},
                            {"tokens", f.tokens},
                            {"wall_seconds", arm.wall_seconds},
                            {"tokens_per_second", f.tokens_per_second},
                            {"decode_tokens_per_second", f.decode_tokens_per_second},
                            {"tokens_per_round", f.tokens_per_round},
                            {"acceptance", f.acceptance},
                            {"first_token_p50_seconds", f.first_token_p50_seconds},
                            {"first_token_p90_seconds", f.first_token_p90_seconds},
                            {"first_token_p99_seconds", f.first_token_p99_seconds},
                            {"draft_seconds_per_round", f.draft_seconds_per_round},
                            {"verify_seconds_per_round", f.verify_seconds_per_round}});
  }
  return json.dump(2) + "\n";
}

}  // namespace dflash::ctl
