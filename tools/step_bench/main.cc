// dflash-step-bench: steps, rounds, prefill and first token of a group, without a server.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/flag_parser.h"
#include "base/status.h"
#include "kernels/device/stream.h"
#include "tools/dflash_bench/report.h"
#include "tools/dflash_bench/timing.h"
#include "tools/step_bench/steps.h"
#include "worker/load_group.h"

namespace dflash::bench {
namespace {

enum ExitCode : int { kExitOk = 0, kExitFailed = 1, kExitBadFlags = 2 };

struct Flags {
  GroupOptions group;
  std::string json, only = "all";
  int64_t seed = 0, rounds = 48, repeats = 5, threads = 0, long_context = 32768, tenths_per_round = 65;
};

FlagParser MakeParser(Flags& flags) {
  FlagParser parser(
      "dflash-step-bench",
      "Measures whole steps and rounds on a target and its drafter, without a server. Acceptance is\n"
      "synthetic, the text is checked against plain decoding.");
  parser.Text("model", "DIR", "folder of the target; required", &flags.group.model);
  parser.Text("draft-model", "DIR", "folder of the drafter; required", &flags.group.draft_model);
  parser.Integer("random-weights", "SEED", "makes weights from this seed; 0: reads those of the folders", 0,
                 int64_t{1} << 62, &flags.seed);
  parser.Integer("threads", "N", "CPU threads; 0: one per core", 0, 256, &flags.threads);
  parser.Integer("max-sequences", "N", "slots", 1, 1024, &flags.group.max_sequences);
  parser.Integer("cache-tokens", "N", "tokens in the paged caches; 0: max-sequences whole contexts", 0,
                 int64_t{1} << 40, &flags.group.cache_tokens);
  parser.Integer("max-prefill-tokens", "N", "prompt tokens in one step", 64, 65536,
                 &flags.group.max_prefill_tokens);
  parser.Integer("long-context", "N", "tokens of the long context", 64, 1 << 20, &flags.long_context);
  parser.Integer("rounds", "N", "rounds of every figure", 1, 100000, &flags.rounds);
  parser.Integer("repeats", "N", "prompts of every figure", 1, 1000, &flags.repeats);
  parser.Integer("tenths-per-round", "N", "ten times the tokens per round of the synthetic acceptance", 10,
                 85, &flags.tenths_per_round);
  parser.Choice("only", {"all", "rounds", "batches", "prefill", "loads"}, "what to measure", &flags.only);
  parser.Text("json", "FILE", "also writes all figures there", &flags.json);
  return parser;
}

int Fail(ExitCode code, const std::string& message) {
  std::fprintf(stderr, "dflash-step-bench: %s\n", message.c_str());
  return code;
}

// "12.31 (12.29-12.40)" as three figures: median, and the tenth and ninetieth percentile.
void AddSpread(Row& row, const std::string& name, std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto at = [&](double share) {
    return values.empty() ? 0
                          : 1e3 * values[static_cast<size_t>(share * static_cast<double>(values.size() - 1))];
  };
  row.figures.push_back({name, at(0.5)});
  row.figures.push_back({"p10", at(0.1)});
  row.figures.push_back({"p90", at(0.9)});
}

Row PartsRow(const std::string& name, const RoundTimes& times, double tokens) {
  Row row = {name, {}};
  AddSpread(row, "round ms", times.round);
  const std::pair<const char*, const std::vector<double>*> parts[] = {{"draft", &times.draft},
                                                                      {"target", &times.target},
                                                                      {"sample", &times.sample},
                                                                      {"commit", &times.commit},
                                                                      {"ingest", &times.ingest}};
  for (const auto& [part, values] : parts) {
    row.figures.push_back({part, 1e3 * Median(*values)});
  }
  row.figures.push_back({"tokens", tokens});
  row.figures.push_back({"tok/s", tokens / Median(times.round)});
  return row;
}

absl::Status AddRounds(const Group& group, const Flags& flags, const RoundCase& c, Report& report) {
  DFLASH_ASSIGN_OR_RETURN(const RoundFigures figures,
                          MeasureRounds(group, c, flags.group.max_prefill_tokens));
  const std::string what =
      absl::StrFormat("%d x %d%s", c.sequences, c.context_tokens,
                      c.sampling.temperature > 0
                          ? absl::StrFormat(", T %.1f top-k %d", c.sampling.temperature, c.sampling.top_k)
                          : std::string());
  const auto sequences = static_cast<double>(c.sequences);
  report.Add(PartsRow(what + ": plain", figures.plain, sequences));
  for (const DraftedFigures& drafted : figures.drafted) {
    const std::string length = c.block_rows.empty() ? "" : absl::StrCat(", ", drafted.block_rows, " rows");
    report.Add(PartsRow(what + length + ": round", drafted.times, drafted.tokens_per_round * sequences));
  }
  if (c.block_rows.empty()) return absl::OkStatus();
  const LoadFigures load = SumUpLoad(c, figures, group.drafter->max_drafts() + 1);
  report.Add({what + ": best",
              {{"tok/s", load.best},
               {"block rows", static_cast<double>(load.best_rows)},
               {"of plain", load.best / load.plain},
               {"chosen rows", static_cast<double>(load.chosen_rows)},
               {"chosen of best", load.chosen / load.best}}});
  return absl::OkStatus();
}

// Multiplications and additions of the linear layers of the target for one prompt row.
double LinearFlop(const TargetConfig& config) {
  const int64_t hidden = config.hidden_size;
  int64_t weights = 0;
  for (TargetLayerKind kind : config.layers) {
    weights += 3 * hidden * config.intermediate_size;
    if (kind == TargetLayerKind::kFullAttention) {
      weights += hidden * config.head_dim * (3 * config.num_attention_heads + 2 * config.num_key_value_heads);
    } else {
      const int64_t values = config.linear_value_heads * config.linear_value_head_dim;
      const int64_t keys = config.linear_key_heads * config.linear_key_head_dim;
      weights += hidden * (2 * keys + 3 * values + 2 * config.linear_value_heads);
    }
  }
  return 2 * static_cast<double>(weights);
}

absl::Status Measure(const Flags& flags, Report& report) {
  const absl::Time start = absl::Now();
  DFLASH_ASSIGN_OR_RETURN(const Group group, LoadGroup(flags.group, [&](const std::string& line) {
                            std::fprintf(stderr, "%6.1f s  %s\n", absl::ToDoubleSeconds(absl::Now() - start),
                                         line.c_str());
                          }));
  // First of all: an engine is made before the first sequence.
  DFLASH_ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine,
                          group.MakeEngine(flags.group.max_prefill_tokens, nullptr));
  DFLASH_RETURN_IF_ERROR(group.stream->Synchronize());
  report.Fact("backend", BackendName());
  report.Fact("model", flags.group.model);
  report.Fact("drafter", flags.group.draft_model);
  report.Fact("weights",
              flags.group.random_weights ? absl::StrCat("random, seed ", flags.seed) : "of the folders");
  report.Fact("ready after", absl::StrFormat("%.1f s", absl::ToDoubleSeconds(absl::Now() - start)));
  report.Fact("cache",
              absl::StrCat(group.table->pages() * kPageTokens, " tokens, ", group.table->slots(), " slots"));
  report.Fact("acceptance",
              absl::StrFormat("synthetic, %.1f tokens per round", 0.1 * flags.tenths_per_round));

  const SamplingParams greedy = {.temperature = 0, .top_k = 0, .top_p = 1, .min_p = 0, .seed = 1};
  const SamplingParams sampled = {.temperature = 0.7f, .top_k = 20, .top_p = 1, .min_p = 0, .seed = 1};
  const auto wanted = [&](const char* what) { return flags.only == "all" || flags.only == what; };
  const RoundCase base = {.sequences = 1,
                          .context_tokens = std::min<int64_t>(1024, flags.long_context),
                          .sampling = greedy,
                          .tokens_per_round = 0.1 * static_cast<double>(flags.tenths_per_round),
                          .block_rows = {},
                          .rounds = flags.rounds};
  report.Section("rounds: parts on the device, the whole by the host's clock, medians in ms");
  if (wanted("rounds")) {
    DFLASH_RETURN_IF_ERROR(AddRounds(group, flags, base, report));
    RoundCase c = base;
    c.sampling = sampled;
    DFLASH_RETURN_IF_ERROR(AddRounds(group, flags, c, report));
    c = base;
    c.context_tokens = flags.long_context;
    c.rounds = std::max<int64_t>(1, flags.rounds / 2);
    DFLASH_RETURN_IF_ERROR(AddRounds(group, flags, c, report));
  }
  if (wanted("batches")) {
    for (int64_t sequences : {2, 4, 8}) {
      if (sequences > group.table->slots()) break;
      RoundCase c = base;
      c.sequences = sequences;
      c.rounds = std::max<int64_t>(1, flags.rounds / 2);
      DFLASH_RETURN_IF_ERROR(AddRounds(group, flags, c, report));
    }
  }
  if (flags.only == "loads") {
    report.Section("loads: rounds of blocks of several lengths, and the best one");
    for (int64_t sequences = 1; sequences <= group.table->slots();
         sequences = sequences == 1 ? 4 : 2 * sequences) {
      RoundCase c = base;
      c.sequences = sequences;
      c.acceptance = RoundCase::Acceptance::kGeometric;
      c.block_rows = BlockLengths(group.drafter->max_drafts() + 1);
      c.block_rows.erase(c.block_rows.begin());  // plain decoding is measured in any case
      DFLASH_RETURN_IF_ERROR(AddRounds(group, flags, c, report));
    }
  }
  if (wanted("prefill")) {
    report.Section("prompts, drafter context included: ms");
    for (int64_t tokens : {int64_t{1024}, std::min<int64_t>(8192, flags.long_context)}) {
      DFLASH_ASSIGN_OR_RETURN(
          const std::vector<double> seconds,
          MeasurePrefill(group, tokens, flags.group.max_prefill_tokens, static_cast<int>(flags.repeats)));
      Row row = {absl::StrCat("prefill ", tokens), {}};
      AddSpread(row, "ms", seconds);
      const double median = Median(seconds);
      row.figures.push_back({"tok/s", static_cast<double>(tokens) / median});
      row.figures.push_back({"linear TFLOP/s", 1e-12 * LinearFlop(group.target->config()) *
                                                   static_cast<double>(tokens) / median});
      report.Add(std::move(row));
    }
    DFLASH_ASSIGN_OR_RETURN(
        const std::vector<double> seconds,
        MeasureFirstToken(*engine, group.vocabulary, std::min<int64_t>(1024, flags.long_context),
                          static_cast<int>(flags.repeats)));
    Row row = {"first token of 1024", {}};
    AddSpread(row, "ms", seconds);
    report.Add(std::move(row));
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Flags flags;
  flags.group.max_prefill_tokens = 2048;
  FlagParser parser = MakeParser(flags);
  FlagParser::Outcome outcome = FlagParser::Outcome::kRun;
  if (absl::Status status = parser.Parse(argc, argv, &outcome); !status.ok()) {
    return Fail(kExitBadFlags, std::string(status.message()));
  }
  if (outcome == FlagParser::Outcome::kHelp) {
    std::fputs(parser.Help().c_str(), stdout);
    return kExitOk;
  }
  if (outcome == FlagParser::Outcome::kVersion) {
    std::puts("dflash-step-bench " DFLASHD_VERSION);
    return kExitOk;
  }
  if (flags.group.model.empty() || flags.group.draft_model.empty()) {
    return Fail(kExitBadFlags, "--model and --draft-model are required");
  }
  flags.group.threads = static_cast<int>(flags.threads);
  if (flags.seed > 0) flags.group.random_weights = static_cast<uint64_t>(flags.seed);
  Report report;
  const absl::Status status = Measure(flags, report);
  if (!flags.json.empty()) {  // also what was measured before a failure
    if (absl::Status written = report.WriteJson(flags.json); !written.ok()) {
      return Fail(kExitFailed, absl::StrCat("--json: ", std::string(written.message())));
    }
  }
  return status.ok() ? kExitOk : Fail(kExitFailed, std::string(status.message()));
}

}  // namespace
}  // namespace dflash::bench

int main(int argc, char** argv) {
  try {
    return dflash::bench::Main(argc, argv);
  } catch (const std::exception& error) {  // last resort: out of memory
    std::fprintf(stderr, "dflash-step-bench: %s\n", error.what());
    return dflash::bench::kExitFailed;
  }
}
