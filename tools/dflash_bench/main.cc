// dflash-bench: what the CPU backend reaches on a pair of models, beside what this machine can do.
#include <cstdio>
#include <exception>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/flag_parser.h"
#include "base/host_limits.h"
#include "base/regular_file.h"
#include "base/status.h"
#include "kernels/device/cpu/instruction_set.h"
#include "kernels/device/cpu/thread_pool.h"
#include "tools/dflash_bench/ceilings.h"
#include "tools/dflash_bench/linear_layers.h"
#include "tools/dflash_bench/load.h"
#include "tools/dflash_bench/operations.h"
#include "tools/dflash_bench/report.h"
#include "tools/dflash_bench/sgemm.h"
#include "tools/dflash_bench/steps.h"
#include "tools/dflash_bench/text_speed.h"

namespace dflash::bench {
namespace {

enum ExitCode : int { kExitOk = 0, kExitFailed = 1, kExitBadFlags = 2 };

struct Flags {
  std::string model, draft_model, instruction_set = "auto", only = "all", text, json, prompts;
  std::string message = "Count from 19 by 9, 11 numbers in all.";
  std::string block_length = "by-load";
  int64_t threads = 0, repeats = 9, context_tokens = 256, max_prefill_tokens = 0;
};

FlagParser MakeParser(Flags& flags) {
  FlagParser parser("dflash-bench",
                    "Measures the CPU backend on a target and its drafter, without a server.");
  parser.Text("model", "DIR", "folder of the target's checkpoint; required", &flags.model);
  parser.Text("draft-model", "DIR", "folder of the drafter's checkpoint; empty: no drafter",
              &flags.draft_model);
  parser.Integer("threads", "N", "most threads; 0: one per core", 0, 256, &flags.threads);
  parser.Choice("instruction-set", {"auto", "scalar", "avx2", "avx512"}, "of the kernels",
                &flags.instruction_set);
  parser.Choice("only", {"all", "linear", "operations", "steps", "text", "load"}, "what to measure",
                &flags.only);
  parser.Integer("repeats", "N", "passes of every figure", 1, 10000, &flags.repeats);
  parser.Integer("context-tokens", "N", "committed tokens before the rows of an operation", 1, 1 << 16,
                 &flags.context_tokens);
  parser.Text("prompts", "FILE", "chat prompts for the load, as in tests/golden/golden.json; empty: no load",
              &flags.prompts);
  parser.Integer("max-prefill-tokens", "N", "prompt tokens in one step under load; 0: the default", 0, 65536,
                 &flags.max_prefill_tokens);
  parser.Choice("block-length", {"by-load", "whole", "off"},
                "how many drafts are verified under load; off: none", &flags.block_length);
  parser.Text("message", "TEXT", "what the steps answer", &flags.message);
  parser.Text("text", "FILE", "text for the tokenizer; empty: the target's chat template and config",
              &flags.text);
  parser.Text("json", "FILE", "also writes all figures there", &flags.json);
  return parser;
}

int Fail(ExitCode code, const std::string& message) {
  std::fprintf(stderr, "dflash-bench: %s\n", message.c_str());
  return code;
}

std::string ProcessorName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

void MeasureCeilings(const std::vector<const Stream*>& streams, int repeats, Report& report) {
  report.Section("ceilings");
  for (const Stream* stream : streams) {
    const int threads = ThreadsOf(*stream).threads();
    Row row = {absl::StrCat(threads, threads == 1 ? " thread" : " threads"), {}};
    for (const auto& [name, kib] :
         {std::pair("32 KiB GB/s", int64_t{32}), std::pair("512 KiB", int64_t{512}),
          std::pair("16 MiB", int64_t{16} << 10), std::pair("256 MiB", int64_t{256} << 10)}) {
      // By size: the first-level cache, the second, the third, memory (on most machines).
      row.figures.push_back({name, 1e-9 * ReadRate(kib * 1024 * threads, *stream, repeats)});
    }
    row.figures.push_back({"GFLOP/s", 1e-9 * MultiplyAddRate(*stream, repeats)});
    row.figures.push_back({"loop us", 1e6 * LoopSeconds(*stream, repeats)});
    report.Add(std::move(row));
  }
}

absl::StatusOr<std::string> TextFor(const Flags& flags) {
  constexpr int64_t kMaxTextBytes = 16 << 20;
  if (!flags.text.empty()) return ReadFile(flags.text, kMaxTextBytes);
  std::string text;
  for (const char* name : {"/config.json", "/chat_template.jinja"}) {
    absl::StatusOr<std::string> part = ReadFile(flags.model + name, kMaxTextBytes);
    if (part.ok()) text += *part;
  }
  if (text.empty()) return absl::NotFoundError(absl::StrCat(flags.model, ": no text to encode; give --text"));
  return text;
}

absl::Status Measure(const Flags& flags, Report& report) {
  DFLASH_ASSIGN_OR_RETURN(const TargetConfig target, TargetConfig::Load(flags.model));
  std::optional<DraftConfig> draft;
  if (!flags.draft_model.empty()) {
    DFLASH_ASSIGN_OR_RETURN(draft, DraftConfig::Load(flags.draft_model));
    DFLASH_RETURN_IF_ERROR(draft->CheckFits(target));
  }
  const DraftConfig* drafter = draft ? &*draft : nullptr;
  const int64_t block = draft ? draft->block_size : 16;
  const int repeats = static_cast<int>(flags.repeats);
  DFLASH_ASSIGN_OR_RETURN(const Stream one, Stream::Create({.threads = 1}));
  DFLASH_ASSIGN_OR_RETURN(const Stream all, Stream::Create({.threads = static_cast<int>(flags.threads)}));
  std::vector<const Stream*> streams = {&one};
  if (ThreadsOf(all).threads() > 1) streams.push_back(&all);

  report.Fact("processor", ProcessorName());
  report.Fact("cores", absl::StrCat(AvailableCores()));
  report.Fact("backend", BackendName());
  report.Fact("instruction set", Name(CurrentInstructionSet()));
  report.Fact("sgemm", SgemmLibrary().empty() ? "none in this build" : SgemmLibrary());
  report.Fact("model", flags.model);
  report.Fact("drafter", flags.draft_model.empty() ? "none" : flags.draft_model);
  const auto wanted = [&](const char* what) { return flags.only == "all" || flags.only == what; };
  MeasureCeilings(streams, repeats, report);
  if (wanted("linear")) {
    for (const Stream* stream : streams)
      MeasureLinearLayers(target, drafter, block, repeats, *stream, report);
  }
  if (wanted("operations")) {
    MeasureOperations(target, drafter, flags.context_tokens, block, repeats, all, report);
  }
  if (wanted("steps")) {
    StepOptions options;
    options.group.model = flags.model;
    options.group.draft_model = flags.draft_model;
    options.group.threads = static_cast<int>(flags.threads);
    options.group.adaptive_blocks = false;  // whole blocks are measured
    options.message = flags.message;
    options.passes = repeats;
    DFLASH_RETURN_IF_ERROR(MeasureSteps(options, target, drafter, report));
  }
  if (wanted("load") && !flags.prompts.empty()) {
    LoadOptions options;
    options.group.model = flags.model;
    options.group.draft_model = flags.draft_model;
    options.group.threads = static_cast<int>(flags.threads);
    options.group.max_sequences = options.clients;
    options.group.max_prefill_tokens = flags.max_prefill_tokens;
    options.group.adaptive_blocks = flags.block_length == "by-load";
    options.speculates = flags.block_length != "off";
    options.prompts = flags.prompts;
    options.passes = repeats;
    DFLASH_RETURN_IF_ERROR(MeasureLoad(options, report));
  }
  if (wanted("text")) {
    DFLASH_ASSIGN_OR_RETURN(const std::string text, TextFor(flags));
    DFLASH_RETURN_IF_ERROR(MeasureText(flags.model, text, repeats, report));
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Flags flags;
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
    std::puts("dflash-bench " DFLASHD_VERSION);
    return kExitOk;
  }
  if (flags.only == "load" && flags.prompts.empty())
    return Fail(kExitBadFlags, "--only load needs --prompts");
  if (flags.model.empty()) return Fail(kExitBadFlags, "--model is required");
  if (absl::Status status = SelectInstructionSet(flags.instruction_set); !status.ok()) {
    return Fail(kExitBadFlags, absl::StrCat("--instruction-set: ", std::string(status.message())));
  }
  ConfigureSgemm(CurrentInstructionSet(), argv);
  Report report;
  if (absl::Status status = Measure(flags, report); !status.ok()) {
    return Fail(kExitFailed, std::string(status.message()));
  }
  if (flags.json.empty()) return kExitOk;
  if (absl::Status status = report.WriteJson(flags.json); !status.ok()) {
    return Fail(kExitFailed, absl::StrCat("--json: ", std::string(status.message())));
  }
  return kExitOk;
}

}  // namespace
}  // namespace dflash::bench

int main(int argc, char** argv) {
  try {
    return dflash::bench::Main(argc, argv);
  } catch (const std::exception& error) {  // last resort: out of memory
    std::fprintf(stderr, "dflash-bench: %s\n", error.what());
    return dflash::bench::kExitFailed;
  }
}
