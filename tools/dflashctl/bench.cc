// dflashctl bench: the same requests without and with speculation, in one run.
#include <cstdio>

#include "base/regular_file.h"
#include "base/status.h"
#include "tools/dflashctl/bench_report.h"
#include "tools/dflashctl/commands.h"
#include "tools/dflashctl/golden_replay.h"
#include "tools/dflashctl/request_flags.h"

namespace dflash::ctl {
namespace {

constexpr int64_t kMaxPromptsBytes = 64 << 20;

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

struct Load {
  std::vector<v1::GenerateRequest> prompts;
  int64_t requests = 16, concurrency = 1, repeat = 2;
};

// One pass of an arm over all requests; appends to the arm.
grpc::Status RunArm(Connection* connection, const Load& load, BenchArm* arm) {
  std::vector<BenchSample> samples(static_cast<size_t>(load.requests));
  const absl::Time begin = absl::Now();
  const grpc::Status status = RunConcurrently(load.requests, load.concurrency, [&](int64_t index) {
    v1::GenerateRequest request = load.prompts[static_cast<size_t>(index) % load.prompts.size()];
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

}  // namespace

int RunBench(int argc, const char* const* argv, Interrupt* interrupt) {
  std::string address = kDefaultAddress, path, kind = "chat", prompt;
  int64_t max_tokens = 128;
  double temperature = 0;
  bool as_json = false;
  Load load;
  FlagParser parser(
      argv[0],
      "Runs the same requests without and with speculation, in turns, and compares speed.\n"
      "Per-round times are those of the passes that a request took part in, shared with its batch.");
  RegisterAddress(&parser, &address);
  parser.Text("prompts", "FILE", "prompts of a golden.json", &path);
  parser.Text("kind", "NAME", "kind of prompt to take from --prompts; empty: all", &kind);
  parser.Text("prompt", "TEXT", "one raw prompt, instead of --prompts", &prompt);
  parser.Integer("requests", "N", "requests per pass", 1, 100000, &load.requests);
  parser.Integer("concurrency", "N", "requests at a time", 1, 256, &load.concurrency);
  parser.Integer("repeat", "N", "passes per arm; their order alternates", 1, 1000, &load.repeat);
  parser.Integer("max-tokens", "N", "tokens of output per request", 1, 1 << 20, &max_tokens);
  parser.Number("temperature", "X", "0 takes the most probable token", 0, 100, &temperature);
  parser.Switch("json", "prints one JSON object", &as_json);
  if (const std::optional<int> exit_code = ParseCommandLine(&parser, argc, argv)) return *exit_code;

  if (path.empty() == prompt.empty()) {
    return UsageError(absl::InvalidArgumentError("give one of --prompts and --prompt"));
  }
  v1::GenerateRequest request;
  request.mutable_sampling()->set_temperature(static_cast<float>(temperature));
  request.mutable_sampling()->set_seed(1);
  request.mutable_stopping()->set_max_tokens(static_cast<uint32_t>(max_tokens));
  request.mutable_output()->set_text(false);
  if (!prompt.empty()) {
    if (const absl::Status valid = CheckUtf8(prompt, "--prompt"); !valid.ok()) return UsageError(valid);
    request.set_text(prompt);
    load.prompts.push_back(request);
  } else {
    const absl::StatusOr<std::string> text = ReadFile(path, kMaxPromptsBytes);
    if (!text.ok()) return UsageError(text.status());
    const absl::StatusOr<std::vector<GoldenPrompt>> golden = ParseGolden(*text);
    if (!golden.ok()) return UsageError(Annotate(golden.status(), path));
    for (const GoldenPrompt& entry : *golden) {
      if (!kind.empty() && entry.kind != kind) continue;
      request.mutable_tokens()->mutable_ids()->Assign(entry.prompt_ids.begin(), entry.prompt_ids.end());
      load.prompts.push_back(request);
    }
    if (load.prompts.empty()) return UsageError(absl::NotFoundError(path + ": no prompt of kind " + kind));
  }

  Connection connection(address, interrupt);
  std::vector<BenchArm> arms = {{"off", {}, 0}, {"dflash", {}, 0}};
  // One request per arm first: nothing that happens only once is measured.
  for (const BenchArm& arm : arms) {
    Load warm_up = load;
    warm_up.requests = 1;
    BenchArm thrown_away = arm;
    if (const grpc::Status status = RunArm(&connection, warm_up, &thrown_away); !status.ok()) {
      return ServerError(status, *interrupt);
    }
  }
  for (int64_t pass = 0; pass < 2 * load.repeat; ++pass) {
    // off, dflash, dflash, off, ...: a slow drift of the machine hits both arms alike.
    BenchArm* arm = &arms[static_cast<size_t>((pass + pass / 2) % 2)];
    if (const grpc::Status status = RunArm(&connection, load, arm); !status.ok()) {
      return ServerError(status, *interrupt);
    }
  }
  std::fputs(as_json ? FormatJson(arms).c_str() : FormatTable(arms).c_str(), stdout);
  return kSuccess;
}

}  // namespace dflash::ctl
