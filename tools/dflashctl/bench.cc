// dflashctl bench: the same requests without and with speculation, in one run; or a load of many clients.
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "base/regular_file.h"
#include "base/status.h"
#include "tools/dflashctl/bench_report.h"
#include "tools/dflashctl/commands.h"
#include "tools/dflashctl/golden_replay.h"
#include "tools/dflashctl/load_plot.h"
#include "tools/dflashctl/load_report.h"
#include "tools/dflashctl/load_run.h"
#include "tools/dflashctl/request_flags.h"

namespace dflash::ctl {
namespace {

constexpr int64_t kMaxPromptsBytes = 64 << 20;
constexpr int64_t kMaxTokens = 1 << 20;  // of one prompt or output

struct BenchFlags {
  EndpointFlags endpoint;
  std::string mode = "compare";
  std::string path, kind = "chat", prompt;
  double temperature = 0;
  bool as_json = false;
  int64_t max_tokens = 128;
  // Compare.
  int64_t requests = 16, concurrency = 1, repeat = 2;
  // Load.
  std::string rates = "1", clients = "1";
  double seconds = 10, warm_up = 0, timeout_seconds = 60;
  int64_t max_requests = 1'000'000;
  std::string prompt_tokens, output_tokens;
  int64_t prefixes = 1, prefix_tokens = 0;
  std::string speculation = "server";
  bool ignore_eos = false, quiet = false;
  std::optional<uint64_t> seed;
  std::optional<double> slo_first_token, slo_per_token, slo_total;  // ms
  std::string plot, samples;
};

FlagParser MakeParser(const char* program, BenchFlags& flags) {
  FlagParser parser(
      program,
      "--mode compare runs the same requests without and with speculation, in turns, and compares speed;\n"
      "per-round times are those of the passes that a request took part in, shared with its batch.\n"
      "--mode closed has clients that send their next request when the last has ended; --mode open sends\n"
      "requests at a rate, at random times, whatever becomes of them, and times each from when it was due.\n"
      "A distribution of counts is N, uniform:MIN:MAX, exponential:MEAN:MAX or lognormal:MEDIAN:SIGMA:MAX.");
  flags.endpoint.Register(&parser);
  parser.Choice("mode", {"compare", "closed", "open"}, "what to do", &flags.mode);
  parser.Text("prompts", "FILE", "prompts of a golden.json", &flags.path);
  parser.Text("kind", "NAME", "kind of prompt to take from --prompts; empty: all", &flags.kind);
  parser.Text("prompt", "TEXT", "compare: one raw prompt, instead of --prompts", &flags.prompt);
  parser.Number("temperature", "X", "0 takes the most probable token", 0, 100, &flags.temperature);
  parser.Integer("max-tokens", "N", "tokens of output per request, where --output-tokens does not say", 1,
                 kMaxTokens, &flags.max_tokens);
  parser.Switch("json", "prints one JSON object", &flags.as_json);
  parser.Integer("requests", "N", "compare: requests per pass", 1, 100000, &flags.requests);
  parser.Integer("concurrency", "N", "compare: requests at a time", 1, 256, &flags.concurrency);
  parser.Integer("repeat", "N", "compare: passes per arm; their order alternates", 1, 1000, &flags.repeat);
  parser.Text("rates", "X,Y,...", "open: requests a second; one phase for each", &flags.rates);
  parser.Text("clients", "N,M,...", "closed: clients, one phase for each; open: connections", &flags.clients);
  parser.Number("seconds", "S", "length of a phase; what was sent is waited for", 0.1, 1e6, &flags.seconds);
  parser.Number("warm-up", "S", "beginning of a phase that is not counted, on top of --seconds", 0, 1e6,
                &flags.warm_up);
  parser.Integer("max-requests", "N", "requests of a phase", 1, 1'000'000, &flags.max_requests);
  parser.Number("timeout", "S", "deadline of a request, from when it was due", 0.001, 1e6,
                &flags.timeout_seconds);
  parser.Text(
      "prompt-tokens", "DISTRIBUTION",
      "tokens of a prompt, cut out of those of --prompts, or random without; default: whole --prompts",
      &flags.prompt_tokens);
  parser.Text("output-tokens", "DISTRIBUTION", "tokens of output", &flags.output_tokens);
  parser.Integer("prefix-tokens", "N", "tokens of a beginning that prompts share", 0, kMaxTokens,
                 &flags.prefix_tokens);
  parser.Integer("prefixes", "N", "how many such beginnings there are", 1, 1 << 20, &flags.prefixes);
  parser.Choice("speculation", {"server", "off", "dflash"}, "load: how to draft", &flags.speculation);
  parser.Switch("ignore-eos", "load: outputs go on to their limit", &flags.ignore_eos);
  parser.Integer("seed", "N", "load: same seed, same requests at the same times", uint64_t{0},
                 std::numeric_limits<uint64_t>::max(), &flags.seed);
  parser.Number("slo-first-token", "MS", "a good request's first token comes within", 0.001, 1e9,
                &flags.slo_first_token);
  parser.Number("slo-per-token", "MS", "a good request's mean time per further token", 0.001, 1e9,
                &flags.slo_per_token);
  parser.Number("slo-total", "MS", "a good request ends within", 0.001, 1e9, &flags.slo_total);
  parser.Text("plot", "FILE.svg", "load: draws it", &flags.plot);
  parser.Text("samples", "FILE.csv", "load: writes one line per request", &flags.samples);
  parser.Switch("quiet", "load: no progress on standard error", &flags.quiet);
  return parser;
}

absl::StatusOr<std::vector<std::vector<uint32_t>>> ReadPrompts(const BenchFlags& flags) {
  DFLASH_ASSIGN_OR_RETURN(const std::string text, ReadFile(flags.path, kMaxPromptsBytes));
  const absl::StatusOr<std::vector<GoldenPrompt>> golden = ParseGolden(text);
  if (!golden.ok()) return Annotate(golden.status(), flags.path);
  std::vector<std::vector<uint32_t>> prompts;
  for (const GoldenPrompt& entry : *golden) {
    if (flags.kind.empty() || entry.kind == flags.kind) prompts.push_back(entry.prompt_ids);
  }
  if (prompts.empty())
    return absl::NotFoundError(absl::StrCat(flags.path, ": no prompt of kind ", flags.kind));
  return prompts;
}

BenchSample ToSample(const Generation& generation) {
  BenchSample sample;
  const v1::Timings& timings = generation.finished.timings();
  sample.tokens = static_cast<int64_t>(generation.token_ids.size());
  sample.rounds = static_cast<int64_t>(generation.rounds.size());
  for (const v1::StepInfo& round : generation.rounds) {
    sample.drafted += round.drafted();
    sample.accepted += round.accepted();
  }
  sample.first_token_seconds = generation.first_token_seconds;
  sample.total_seconds = generation.total_seconds;
  sample.decode_seconds = timings.decode_seconds();
  sample.draft_seconds = timings.draft_seconds();
  sample.verify_seconds = timings.verify_seconds();
  return sample;
}

// One pass of an arm over `count` requests; appends to the arm.
grpc::Status RunArm(Connection* connection, const std::vector<v1::GenerateRequest>& prompts, int64_t count,
                    int64_t concurrency, BenchArm* arm) {
  std::vector<BenchSample> samples(static_cast<size_t>(count));
  const absl::Time begin = absl::Now();
  const grpc::Status status = RunConcurrently(count, concurrency, [&](int64_t index) {
    v1::GenerateRequest request = prompts[static_cast<size_t>(index) % prompts.size()];
    request.mutable_speculation()->set_mode(ParseSpeculation(arm->name));
    request.mutable_speculation()->set_strict(true);
    Generation generation;
    const grpc::Status answered =
        connection->Generate(request, absl::InfiniteDuration(), nullptr, &generation);
    samples[static_cast<size_t>(index)] = ToSample(generation);
    return answered;
  });
  arm->wall_seconds += absl::ToDoubleSeconds(absl::Now() - begin);
  arm->samples.insert(arm->samples.end(), samples.begin(), samples.end());
  return status;
}

int RunCompare(const BenchFlags& flags, const Endpoint& endpoint, Interrupt* interrupt) {
  if (flags.path.empty() == flags.prompt.empty()) {
    return UsageError(absl::InvalidArgumentError("give one of --prompts and --prompt"));
  }
  v1::GenerateRequest request;
  request.mutable_sampling()->set_temperature(static_cast<float>(flags.temperature));
  request.mutable_sampling()->set_seed(1);
  request.mutable_stopping()->set_max_tokens(static_cast<uint32_t>(flags.max_tokens));
  request.mutable_output()->set_text(false);
  std::vector<v1::GenerateRequest> prompts;
  if (!flags.prompt.empty()) {
    if (const absl::Status valid = CheckUtf8(flags.prompt, "--prompt"); !valid.ok()) return UsageError(valid);
    request.set_text(flags.prompt);
    prompts.push_back(request);
  } else {
    const auto golden = ReadPrompts(flags);
    if (!golden.ok()) return UsageError(golden.status());
    for (const std::vector<uint32_t>& prompt : *golden) {
      request.mutable_tokens()->mutable_ids()->Assign(prompt.begin(), prompt.end());
      prompts.push_back(request);
    }
  }
  Connection connection(endpoint, interrupt);
  std::vector<BenchArm> arms = {{"off", {}, 0}, {"dflash", {}, 0}};
  // One request per arm first: nothing that happens only once is measured.
  for (const BenchArm& arm : arms) {
    BenchArm thrown_away = arm;
    const grpc::Status status = RunArm(&connection, prompts, 1, 1, &thrown_away);
    if (!status.ok()) return ServerError(status, *interrupt);
  }
  for (int64_t pass = 0; pass < 2 * flags.repeat; ++pass) {
    // off, dflash, dflash, off, ...: a slow drift of the machine hits both arms alike.
    BenchArm* arm = &arms[static_cast<size_t>((pass + pass / 2) % 2)];
    const grpc::Status status = RunArm(&connection, prompts, flags.requests, flags.concurrency, arm);
    if (!status.ok()) return ServerError(status, *interrupt);
  }
  std::fputs(flags.as_json ? FormatJson(arms).c_str() : FormatTable(arms).c_str(), stdout);
  return kSuccess;
}

// "1,2.5,10" -> numbers within [min, max].
absl::StatusOr<std::vector<double>> ParseList(const std::string& text, const char* flag, double min,
                                              double max) {
  std::vector<double> numbers;
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    const std::string entry = text.substr(at, comma - at);
    char* end = nullptr;
    const double number = std::strtod(entry.c_str(), &end);
    if (entry.empty() || *end != '\0' || !(number >= min && number <= max)) {
      return absl::InvalidArgumentError(absl::StrCat(flag, " must be numbers from ", min, " to ", max,
                                                     " with commas between, not '", text, "'"));
    }
    numbers.push_back(number);
    at = comma + 1;
  }
  return numbers;
}

absl::StatusOr<std::vector<LoadPhase>> MakePhases(const BenchFlags& flags) {
  LoadPhase phase;
  phase.seconds = flags.seconds + flags.warm_up;
  phase.max_requests = flags.max_requests;
  phase.timeout = absl::Seconds(flags.timeout_seconds);
  phase.seed = flags.seed.value_or(1);
  std::vector<LoadPhase> phases;
  DFLASH_ASSIGN_OR_RETURN(const std::vector<double> clients, ParseList(flags.clients, "--clients", 1, 1000));
  if (flags.mode == "closed") {
    for (double count : clients) {
      phase.clients = static_cast<int64_t>(count);
      phases.push_back(phase);
    }
  } else {
    if (clients.size() != 1) return absl::InvalidArgumentError("--mode open takes one number of --clients");
    phase.clients = static_cast<int64_t>(clients[0]);
    DFLASH_ASSIGN_OR_RETURN(const std::vector<double> rates, ParseList(flags.rates, "--rates", 1e-3, 1e5));
    for (double rate : rates) {
      phase.rate = rate;
      phases.push_back(phase);
    }
  }
  for (size_t i = 0; i < phases.size(); ++i) phases[i].first_index = i * 1'000'000;
  return phases;
}

// Everything of the load but its size; asks the server for its vocabulary when prompts are to be random.
absl::StatusOr<LoadShape> MakeShape(const BenchFlags& flags) {
  LoadShape shape;
  shape.seed = flags.seed.value_or(1);
  shape.prefixes = flags.prefixes;
  shape.prefix_tokens = flags.prefix_tokens;
  const std::string outputs =
      flags.output_tokens.empty() ? absl::StrCat(flags.max_tokens) : flags.output_tokens;
  const auto output_tokens = CountDistribution::Parse(outputs, kMaxTokens);
  if (!output_tokens.ok()) return Annotate(output_tokens.status(), "--output-tokens");
  shape.output_tokens = *output_tokens;
  if (flags.path.empty() && flags.prompt_tokens.empty()) {
    return absl::InvalidArgumentError("give one of --prompts and --prompt-tokens, or both");
  }
  if (!flags.prompt_tokens.empty()) {
    const auto prompt_tokens = CountDistribution::Parse(flags.prompt_tokens, kMaxTokens);
    if (!prompt_tokens.ok()) return Annotate(prompt_tokens.status(), "--prompt-tokens");
    shape.prompt_tokens = *prompt_tokens;
  }
  if (!flags.path.empty()) {
    DFLASH_ASSIGN_OR_RETURN(shape.whole, ReadPrompts(flags));
    for (const auto& prompt : shape.whole) shape.text.insert(shape.text.end(), prompt.begin(), prompt.end());
    if (!flags.prompt_tokens.empty()) shape.whole.clear();
  }
  return shape;
}

absl::Status WriteFile(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  return file.good() ? absl::OkStatus() : absl::UnknownError(absl::StrCat("cannot write ", path));
}

int RunLoadPhases(const BenchFlags& flags, const Endpoint& endpoint, Interrupt* interrupt) {
  if (!flags.prompt.empty()) return UsageError(absl::InvalidArgumentError("--prompt is for --mode compare"));
  const absl::StatusOr<std::vector<LoadPhase>> phases = MakePhases(flags);
  if (!phases.ok()) return UsageError(phases.status());
  absl::StatusOr<LoadShape> shape = MakeShape(flags);
  if (!shape.ok()) return UsageError(shape.status());
  Connection connection(endpoint, interrupt);
  v1::GetModelInfoResponse model;
  if (const grpc::Status status = connection.GetModelInfo(&model); !status.ok()) {
    return ServerError(status, *interrupt);
  }
  // Special tokens stand at the end of a vocabulary.
  shape->vocabulary = std::max(1u, model.vocabulary_size() / 16 * 15);

  v1::GenerateRequest base;
  base.mutable_sampling()->set_temperature(static_cast<float>(flags.temperature));
  base.mutable_output()->set_text(false);
  base.mutable_speculation()->set_mode(ParseSpeculation(flags.speculation));
  base.mutable_stopping()->set_ignore_eos(flags.ignore_eos);
  const RequestMaker maker(*std::move(shape), base);
  const auto ms = [](const std::optional<double>& value) {
    return value ? std::optional(*value * 1e-3) : std::nullopt;
  };
  const Slo slo = {.first_token = ms(flags.slo_first_token),
                   .per_token = ms(flags.slo_per_token),
                   .total = ms(flags.slo_total)};
  const bool terminal = isatty(STDERR_FILENO) != 0;
  std::vector<LoadResult> results;
  std::vector<LoadFigures> figures;
  for (const LoadPhase& phase : *phases) {
    const auto show = [&](const LoadProgress& progress) {
      std::fprintf(stderr, terminal ? "\r%s\x1b[K" : "%s\n", FormatProgress(phase, progress).c_str());
    };
    results.push_back(RunLoad(endpoint, phase, maker, interrupt,
                              flags.quiet ? std::function<void(const LoadProgress&)>() : show));
    if (terminal && !flags.quiet) std::fputs("\r\x1b[K", stderr);
    figures.push_back(Summarize(results.back(), slo, flags.warm_up));
    if (interrupt->raised()) break;
  }
  std::fputs(flags.as_json ? FormatLoadJson(figures).c_str() : FormatLoadTable(figures).c_str(), stdout);
  if (!flags.plot.empty()) {
    if (const absl::Status status = WriteFile(flags.plot, FormatPlot(results, figures)); !status.ok()) {
      return UsageError(status);
    }
  }
  if (!flags.samples.empty()) {
    if (const absl::Status status = WriteFile(flags.samples, FormatSamples(results)); !status.ok()) {
      return UsageError(status);
    }
  }
  return interrupt->raised() ? kInterrupted : kSuccess;
}

}  // namespace

int RunBench(int argc, const char* const* argv, Interrupt* interrupt) {
  BenchFlags flags;
  FlagParser parser = MakeParser(argv[0], flags);
  if (const std::optional<int> exit_code = ParseCommandLine(&parser, argc, argv)) return *exit_code;
  const absl::StatusOr<Endpoint> endpoint = flags.endpoint.Read();
  if (!endpoint.ok()) return UsageError(endpoint.status());
  return flags.mode == "compare" ? RunCompare(flags, *endpoint, interrupt)
                                 : RunLoadPhases(flags, *endpoint, interrupt);
}

}  // namespace dflash::ctl
