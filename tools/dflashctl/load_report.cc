#include "tools/dflashctl/load_report.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"

namespace dflash::ctl {
namespace {

double Ratio(double numerator, double denominator) { return denominator > 0 ? numerator / denominator : 0; }
double Ratio(int64_t numerator, int64_t denominator) {
  return Ratio(static_cast<double>(numerator), static_cast<double>(denominator));
}

using Weighted = std::vector<std::pair<double, int64_t>>;

std::optional<double> PerToken(const LoadSample& sample) {
  if (sample.tokens < 2) return std::nullopt;
  return (sample.last_token - sample.first_token) / static_cast<double>(sample.tokens - 1);
}

std::string CodeName(const LoadSample& sample) {
  if (sample.code == grpc::StatusCode::OK) return "OK";
  // absl's and gRPC's codes have equal numbers.
  const std::string name = absl::StatusCodeToString(static_cast<absl::StatusCode>(sample.code));
  return sample.reason.empty() ? name : absl::StrCat(name, " ", sample.reason);
}

struct Row {
  const char* label;
  Quantiles LoadFigures::*quantiles;
};
constexpr Row kRows[] = {{"first token", &LoadFigures::first_token},
                         {"whole request", &LoadFigures::total},
                         {"in the queue", &LoadFigures::queue},
                         {"step interval", &LoadFigures::step_interval},
                         {"per token", &LoadFigures::per_token},
                         {"per token, means of requests", &LoadFigures::request_per_token},
                         {"refusal", &LoadFigures::refusal},
                         {"sent after it was due", &LoadFigures::send_delay}};

nlohmann::ordered_json ToJson(const Quantiles& q) {
  return {{"count", q.count}, {"mean", q.mean}, {"p50", q.p50},   {"p90", q.p90},
          {"p95", q.p95},     {"p99", q.p99},   {"p999", q.p999}, {"max", q.max}};
}

}  // namespace

Quantiles QuantilesOf(Weighted values) {
  Quantiles result;
  std::sort(values.begin(), values.end());
  double sum = 0;
  for (const auto& [value, weight] : values) {
    result.count += weight;
    sum += value * static_cast<double>(weight);
  }
  if (result.count == 0) return result;
  result.mean = sum / static_cast<double>(result.count);
  result.max = values.back().first;
  struct Target {
    double fraction;
    double Quantiles::*figure;
  };
  int64_t below = 0;
  size_t at = 0;
  for (const Target& target :
       {Target{0.5, &Quantiles::p50}, Target{0.9, &Quantiles::p90}, Target{0.95, &Quantiles::p95},
        Target{0.99, &Quantiles::p99}, Target{0.999, &Quantiles::p999}}) {
    const auto rank = static_cast<int64_t>(std::ceil(target.fraction * static_cast<double>(result.count)));
    while (below + values[at].second < rank) below += values[at++].second;
    result.*target.figure = values[at].first;
  }
  return result;
}

bool Meets(const LoadSample& sample, const Slo& slo) {
  if (sample.code != grpc::StatusCode::OK) return false;
  if (slo.first_token && !(sample.first_token >= 0 && sample.first_token <= *slo.first_token)) return false;
  if (slo.per_token && PerToken(sample).value_or(0) > *slo.per_token) return false;
  return !slo.total || sample.end <= *slo.total;
}

LoadFigures Summarize(const LoadResult& result, const Slo& slo, double warm_up) {
  LoadFigures figures;
  figures.phase = result.phase;
  figures.wall_seconds = std::max(0.0, result.wall_seconds - warm_up);
  Weighted first_token, total, queue, request_per_token, step_interval, per_token, refusal, send_delay;
  int64_t good = 0, rounds = 0, drafted = 0, accepted = 0;
  for (const LoadSample& sample : result.requests) {
    if (sample.due < warm_up) continue;
    ++figures.sent;
    ++figures.ends[CodeName(sample)];
    figures.tokens += sample.tokens;
    figures.prompt_tokens += sample.prompt_tokens;
    figures.cached_tokens += sample.cached_tokens;
    rounds += sample.rounds;
    drafted += sample.drafted;
    accepted += sample.accepted;
    good += Meets(sample, slo) ? 1 : 0;
    send_delay.emplace_back(sample.delay, 1);
    if (sample.Refused()) {
      ++figures.refused;
      figures.refused_without_hint += sample.retry_after < 0 ? 1 : 0;
      refusal.emplace_back(sample.end, 1);
    } else if (sample.code != grpc::StatusCode::OK) {
      ++figures.failed;
    } else {
      ++figures.finished;
      first_token.emplace_back(sample.first_token, 1);
      total.emplace_back(sample.end, 1);
      queue.emplace_back(sample.queue, 1);
      if (const auto each = PerToken(sample)) request_per_token.emplace_back(*each, 1);
    }
  }
  for (const StepSample& step : result.steps) {
    if (step.due < warm_up) continue;
    step_interval.emplace_back(step.seconds, 1);
    per_token.emplace_back(step.seconds / static_cast<double>(step.tokens), step.tokens);
  }
  figures.tokens_per_second = Ratio(static_cast<double>(figures.tokens), figures.wall_seconds);
  figures.requests_per_second = Ratio(static_cast<double>(figures.finished), figures.wall_seconds);
  figures.good_requests_per_second = Ratio(static_cast<double>(good), figures.wall_seconds);
  figures.good_share = Ratio(good, figures.sent);
  figures.tokens_per_round = rounds > 0 ? 1 + Ratio(accepted, rounds) : 0;
  figures.acceptance = Ratio(accepted, drafted);
  figures.first_token = QuantilesOf(std::move(first_token));
  figures.total = QuantilesOf(std::move(total));
  figures.queue = QuantilesOf(std::move(queue));
  figures.request_per_token = QuantilesOf(std::move(request_per_token));
  figures.step_interval = QuantilesOf(std::move(step_interval));
  figures.per_token = QuantilesOf(std::move(per_token));
  figures.refusal = QuantilesOf(std::move(refusal));
  figures.send_delay = QuantilesOf(std::move(send_delay));
  return figures;
}

std::string FormatLoadTable(const std::vector<LoadFigures>& phases) {
  std::string text;
  const auto row = [&](const std::string& label, const auto& value) {
    absl::StrAppend(&text, absl::StrFormat("%-34s", label));
    for (const LoadFigures& figures : phases) absl::StrAppend(&text, absl::StrFormat("%17s", value(figures)));
    absl::StrAppend(&text, "\n");
  };
  const auto count = [&](const char* label, int64_t LoadFigures::*figure) {
    row(label, [&](const LoadFigures& f) { return absl::StrCat(f.*figure); });
  };
  const auto number = [&](const char* label, double LoadFigures::*figure, int decimals) {
    row(label, [&](const LoadFigures& f) { return absl::StrFormat("%.*f", decimals, f.*figure); });
  };
  row("load", [](const LoadFigures& f) { return f.phase.Name(); });
  count("requests sent", &LoadFigures::sent);
  count("  finished", &LoadFigures::finished);
  count("  refused", &LoadFigures::refused);
  count("  failed", &LoadFigures::failed);
  number("requests/s", &LoadFigures::requests_per_second, 2);
  number("goodput, requests/s", &LoadFigures::good_requests_per_second, 2);
  number("goodput, share of those sent", &LoadFigures::good_share, 3);
  number("tokens/s", &LoadFigures::tokens_per_second, 1);
  number("tokens per round", &LoadFigures::tokens_per_round, 3);
  number("accepted share of drafts", &LoadFigures::acceptance, 3);
  absl::StrAppend(&text, "p50/p99, ms\n");
  for (const Row& quantiles : kRows) {
    row(absl::StrCat("  ", quantiles.label), [&](const LoadFigures& f) {
      const Quantiles& q = f.*quantiles.quantiles;
      return q.count == 0 ? std::string("-") : absl::StrFormat("%.1f/%.1f", q.p50 * 1e3, q.p99 * 1e3);
    });
  }
  for (const LoadFigures& figures : phases) {
    for (const auto& [end, times] : figures.ends) {
      if (end != "OK") absl::StrAppend(&text, figures.phase.Name(), ": ", times, " x ", end, "\n");
    }
  }
  return text;
}

std::string FormatLoadJson(const std::vector<LoadFigures>& phases) {
  nlohmann::ordered_json json;
  json["phases"] = nlohmann::ordered_json::array();
  for (const LoadFigures& f : phases) {
    nlohmann::ordered_json phase = {{"name", f.phase.Name()},
                                    {"mode", f.phase.open() ? "open" : "closed"},
                                    {"rate", f.phase.rate},
                                    {"clients", f.phase.clients},
                                    {"wall_seconds", f.wall_seconds},
                                    {"sent", f.sent},
                                    {"finished", f.finished},
                                    {"refused", f.refused},
                                    {"refused_without_hint", f.refused_without_hint},
                                    {"failed", f.failed},
                                    {"ends", f.ends},
                                    {"tokens", f.tokens},
                                    {"prompt_tokens", f.prompt_tokens},
                                    {"cached_tokens", f.cached_tokens},
                                    {"tokens_per_second", f.tokens_per_second},
                                    {"requests_per_second", f.requests_per_second},
                                    {"good_requests_per_second", f.good_requests_per_second},
                                    {"good_share", f.good_share},
                                    {"tokens_per_round", f.tokens_per_round},
                                    {"acceptance", f.acceptance}};
    phase["first_token_seconds"] = ToJson(f.first_token);
    phase["total_seconds"] = ToJson(f.total);
    phase["queue_seconds"] = ToJson(f.queue);
    phase["step_interval_seconds"] = ToJson(f.step_interval);
    phase["per_token_seconds"] = ToJson(f.per_token);
    phase["request_per_token_seconds"] = ToJson(f.request_per_token);
    phase["refusal_seconds"] = ToJson(f.refusal);
    phase["send_delay_seconds"] = ToJson(f.send_delay);
    json["phases"].push_back(std::move(phase));
  }
  return json.dump(2) + "\n";
}

std::string FormatSamples(const std::vector<LoadResult>& phases) {
  std::string text =
      "phase,client,due_s,delay_s,queue_s,first_token_s,last_token_s,end_s,prompt_tokens,cached_tokens,"
      "tokens,"
      "rounds,drafted,accepted,end,retry_after_s\n";
  for (const LoadResult& result : phases) {
    for (const LoadSample& s : result.requests) {
      absl::StrAppend(
          &text, absl::StrFormat("%s,%d,%.6f,%.6f,%.6f,%.6f,%.6f,%.6f,%d,%d,%d,%d,%d,%d,%s,%.3f\n",
                                 result.phase.Name(), s.client, s.due, s.delay, s.queue, s.first_token,
                                 s.last_token, s.end, s.prompt_tokens, s.cached_tokens, s.tokens, s.rounds,
                                 s.drafted, s.accepted, CodeName(s), s.retry_after));
    }
  }
  return text;
}

std::string FormatProgress(const LoadPhase& phase, const LoadProgress& p) {
  return absl::StrFormat(
      "%s  %.0f s  sent %d, running %d, finished %d, refused %d, failed %d  %.0f tokens/s  first token "
      "%.0f/%.0f ms",
      phase.Name(), p.seconds, p.sent, p.running, p.finished, p.refused, p.failed, p.tokens_per_second,
      p.first_token_p50 * 1e3, p.first_token_p99 * 1e3);
}

}  // namespace dflash::ctl
