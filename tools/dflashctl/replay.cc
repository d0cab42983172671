// dflashctl replay: golden prompts against a running server.
#include <algorithm>
#include <cstdio>

#include "base/regular_file.h"
#include "base/status.h"
#include "tools/dflashctl/block_cuts.h"
#include "tools/dflashctl/commands.h"
#include "tools/dflashctl/golden_replay.h"
#include "tools/dflashctl/greedy_request.h"
#include "tools/dflashctl/request_flags.h"

namespace dflash::ctl {
namespace {

constexpr int64_t kMaxGoldenBytes = 64 << 20;

}  // namespace

int RunReplay(int argc, const char* const* argv, Interrupt* interrupt) {
  EndpointFlags endpoint_flags;
  std::string path, speculation = "dflash";
  int64_t concurrency = 1, max_tokens = 128;
  FlagParser parser(
      argv[0],
      "Sends every prompt of a golden.json as token ids, greedy, and compares the output and the acceptance\n"
      "length of every round but the last, and the mean per kind of prompt. Lengths of prompts whose blocks\n"
      "were cut (--max-verify-rows, or a limit on drafts) are left out. Exit code 1 on any difference.");
  endpoint_flags.Register(&parser);
  parser.Positional("FILE", "golden data (tests/golden/golden.json)", &path);
  parser.Integer("concurrency", "N", "requests at a time", 1, 256, &concurrency);
  parser.Integer("max-tokens", "N", "limit that the golden outputs were made with", 1, 1 << 20, &max_tokens);
  parser.Choice("speculation", {"dflash", "off"}, "with 'off' only outputs are compared", &speculation);
  if (const std::optional<int> exit_code = ParseCommandLine(&parser, argc, argv)) return *exit_code;
  const absl::StatusOr<std::string> text = ReadFile(path, kMaxGoldenBytes);
  if (!text.ok()) return UsageError(text.status());
  const absl::StatusOr<std::vector<GoldenPrompt>> golden = ParseGolden(*text);
  if (!golden.ok()) return UsageError(Annotate(golden.status(), path));

  const absl::StatusOr<Endpoint> endpoint = endpoint_flags.Read();
  if (!endpoint.ok()) return UsageError(endpoint.status());
  Connection connection(*endpoint, interrupt);
  const bool compare_lengths = speculation == "dflash";
  v1::GetModelInfoResponse model;
  if (const grpc::Status status = connection.GetModelInfo(&model); !status.ok())
    return ServerError(status, *interrupt);
  std::vector<Replayed> replayed(golden->size());
  std::vector<Generation> generations(golden->size());
  const grpc::Status status =
      RunConcurrently(static_cast<int64_t>(golden->size()), concurrency, [&](int64_t index) {
        const auto i = static_cast<size_t>(index);
        return connection.Generate(
            GreedyRequest((*golden)[i].prompt_ids, max_tokens, ParseSpeculation(speculation)),
            absl::InfiniteDuration(), nullptr, &generations[i]);
      });
  if (!status.ok()) return ServerError(status, *interrupt);
  BlockCuts cuts(model.drafter().block_size());
  for (size_t i = 0; i < replayed.size(); ++i) {
    // A server that does not draft at all cuts nothing.
    const bool drafts = std::any_of(generations[i].rounds.begin(), generations[i].rounds.end(),
                                    [](const v1::StepInfo& round) { return round.drafted() > 0; });
    replayed[i].cut = compare_lengths && drafts && cuts.Add(generations[i], max_tokens);
    replayed[i].output_ids = std::move(generations[i].token_ids);
    for (const v1::StepInfo& round : generations[i].rounds)
      replayed[i].acceptance_lengths.push_back(int64_t{round.accepted()} + 1);
  }
  ReplayReport report = Report(*golden, replayed, compare_lengths);
  if (cuts.any()) report.cuts = cuts.Describe();
  std::fputs(Format(report).c_str(), stdout);
  return report.Passed() ? kSuccess : kDifferent;
}

}  // namespace dflash::ctl
