// dflash-doctor: says at which interface drafter and target diverge (docs/diagnosing-acceptance.md).
// `dflashctl doctor` and `dflashctl golden` run it; there is one program per backend.
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <optional>
#include <string>
#include <string_view>

#include "absl/strings/str_format.h"
#include "base/flag_parser.h"
#include "kernels/device/stream.h"
#include "tools/doctor/doctor.h"
#include "tools/doctor/record_bundle.h"
#include "worker/golden/golden_bundle.h"

namespace dflash::doctor {

using golden::BundleComparison;
using golden::GoldenBundle;
namespace {

enum ExitCode : int { kHealthy = 0, kDifferent = 1, kUsage = 2, kCannotRun = 3, kOutputLost = 4 };

int Fail(ExitCode code, const absl::Status& status) {
  std::fprintf(stderr, "error: %s\n", std::string(status.message()).c_str());
  return code;
}

int Fail(const absl::Status& status) {
  const bool input = absl::IsInvalidArgument(status) || absl::IsUnimplemented(status) ||
                     absl::IsNotFound(status) || absl::IsDataLoss(status) || absl::IsAlreadyExists(status);
  return Fail(input ? kUsage : kCannotRun, status);
}

// The exit code, or that of output which did not arrive.
int CheckOutput(int code) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  std::fputs("error: standard output cannot be written\n", stderr);
  return code == kHealthy ? kOutputLost : code;
}

// Parses; the exit code when that is all. name: as it was called.
bool Done(FlagParser& parser, const char* name, int argc, const char* const* argv, int* code) {
  FlagParser::Outcome outcome = FlagParser::Outcome::kRun;
  if (const absl::Status status = parser.Parse(argc, argv, &outcome); !status.ok()) {
    std::fprintf(stderr, "%s: %s\nTry: %s --help\n", name, std::string(status.message()).c_str(), name);
    *code = kUsage;
    return true;
  }
  *code = kHealthy;
  if (outcome == FlagParser::Outcome::kHelp) std::fputs(parser.Help().c_str(), stdout);
  if (outcome == FlagParser::Outcome::kVersion) std::puts("dflash-doctor " DFLASHD_VERSION);
  return outcome != FlagParser::Outcome::kRun;
}

struct Flags {
  DoctorOptions doctor;
  int64_t ranks = 1, threads = 0, device = 0;
  std::optional<int64_t> max_context_tokens;
  void Register(FlagParser& parser) {
    parser.Text("model", "DIR", "folder of the target's checkpoint", &doctor.model);
    parser.Text("draft-model", "DIR", "folder of the drafter's checkpoint", &doctor.draft_model);
    parser.Text("golden", "DIR",
                "golden bundle (docs/golden-bundle.md); default: DRAFT-MODEL/golden, if there is one",
                &doctor.golden);
    parser.Integer("threads", "N", "CPU threads per rank; 0: one per core", 0, 256, &threads);
    parser.Integer("device", "N", "CUDA device ordinal", 0, 1023, &device);
    parser.Integer("max-context-tokens", "N",
                   "longest sequence that is tried (default 4096, or what the target has positions for)", 512,
                   1 << 20, &max_context_tokens);
    parser.Switch("allow-unlisted-config-keys",
                  "accept keys of config.json that docs/config-keys.md does not list",
                  &doctor.allow_unlisted_keys);
  }
  absl::Status Finish() {
    doctor.ranks = static_cast<int>(ranks);
    doctor.threads = static_cast<int>(threads);
    doctor.device = static_cast<int>(device);
    doctor.max_context_tokens = max_context_tokens.value_or(0);
    if (doctor.model.empty() || doctor.draft_model.empty())
      return absl::InvalidArgumentError("--model and --draft-model are required");
    return absl::OkStatus();
  }
};

int Examine(int argc, const char* const* argv) {
  Flags flags;
  bool json = false, probe = false, quiet = false;
  std::string colour = "auto";
  FlagParser parser(
      "dflash-doctor",
      "Walks the interfaces between target and drafter and names the first one at which they diverge.\n"
      "Exit codes: 0 nothing failed; 1 the integration is broken; 2 wrong usage or bad files; 3 cannot run; "
      "4 standard output cannot be written; 5 the drafter is bad; 6 the integration or the drafter.\n"
      "First argument `record` or `compare`: golden bundles; see dflash-doctor record --help, dflash-doctor "
      "compare --help.");
  flags.Register(parser);
  parser.Integer("tp", "N", "ranks that share the target, as threads", 1, 8, &flags.ranks);
  parser.Integer("max-prompts", "N", "golden prompts that are generated", 1, 4096, &flags.doctor.max_prompts);
  parser.Switch("stop-at-first-failure", "leave out what is expensive once an interface has failed",
                &flags.doctor.stop_at_first_failure);
  parser.Switch("json", "prints the report as JSON", &json);
  parser.Choice("color", {"auto", "always", "never"}, "colours; auto: when a terminal reads", &colour);
  parser.Switch("quiet", "no progress on standard error", &quiet);
  parser.Text("inject-defect", "NAME", "plant a known integration defect (test builds only)",
              &flags.doctor.defect);
  parser.Switch("probe", "only tell whether this backend finds its device", &probe);
  int code = 0;
  if (Done(parser, argv[0], argc, argv, &code)) return code;
  if (probe) {
    const absl::Status status =
        Stream::Create({.threads = 1, .device = static_cast<int>(flags.device)}).status();
    return status.ok() ? kHealthy : Fail(kCannotRun, status);
  }
  const auto failed = [&](const absl::Status& status, int exit_code) {
    if (json) std::fputs(ErrorJson(std::string(status.message()), exit_code).c_str(), stdout);
    return exit_code;
  };
  if (const absl::Status status = flags.Finish(); !status.ok()) return failed(status, Fail(kUsage, status));
  if (!quiet) flags.doctor.log = [](const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); };
  const absl::StatusOr<Report> report = RunDoctor(flags.doctor);
  if (!report.ok()) return failed(report.status(), Fail(report.status()));
  const bool colours = colour == "always" || (colour == "auto" && isatty(STDOUT_FILENO) == 1);
  std::fputs((json ? report->ToJson() : report->ToText(colours)).c_str(), stdout);
  return report->ExitCode();
}

int Record(int argc, const char* const* argv) {
  Flags flags;
  std::string out;
  int64_t tensor_prompts = 3, max_tokens = 128;
  FlagParser parser(
      "dflash-doctor record",
      "Writes what this program computes as a golden bundle, for comparison with other engines. "
      "Not an oracle of itself.");
  flags.Register(parser);
  parser.Text("out", "DIR", "new folder for the bundle", &out);
  parser.Integer("tensor-prompts", "N", "prompts whose tensors are written", 0, 4096, &tensor_prompts);
  parser.Integer("max-tokens", "N", "tokens of an output", 1, 65536, &max_tokens);
  int code = 0;
  if (Done(parser, "dflash-doctor record", argc, argv, &code)) return code;
  if (const absl::Status status = flags.Finish(); !status.ok()) return Fail(kUsage, status);
  if (out.empty() || flags.doctor.golden.empty())
    return Fail(kUsage,
                absl::InvalidArgumentError("--out and --golden (a bundle with the prompts) are required"));
  const absl::Status status = RecordBundle(flags.doctor, out, tensor_prompts, max_tokens);
  return status.ok() ? kHealthy : Fail(status);
}

int Compare(int argc, const char* const* argv) {
  std::string actual_folder, expected_folder;
  double limit = 1e-3;
  bool all = false;
  FlagParser parser("dflash-doctor compare",
                    "Compares two golden bundles in the order of the interfaces.\n"
                    "Exit codes: 0 alike; 1 a difference; 2 a bundle cannot be read.");
  parser.Positional("ACTUAL", "folder of the bundle in question", &actual_folder);
  parser.Positional("EXPECTED", "folder of the bundle that it should equal", &expected_folder);
  parser.Number("limit", "ERROR", "of tensors, max |difference| / rms", 0, 10, &limit);
  parser.Switch("all", "prints what is alike, too", &all);
  int code = 0;
  if (Done(parser, "dflash-doctor compare", argc, argv, &code)) return code;
  const absl::StatusOr<GoldenBundle> actual = GoldenBundle::Open(actual_folder);
  if (!actual.ok()) return Fail(kUsage, actual.status());
  const absl::StatusOr<GoldenBundle> expected = GoldenBundle::Open(expected_folder);
  if (!expected.ok()) return Fail(kUsage, expected.status());
  const absl::StatusOr<BundleComparison> comparison = CompareBundles(*actual, *expected, limit);
  if (!comparison.ok()) return Fail(kUsage, comparison.status());
  for (const BundleComparison::Line& line : comparison->lines) {
    if (all || line.differs())
      std::fputs(absl::StrFormat("%-9s %-10.3g %s (%s)\n", line.differs() ? "DIFFERS" : "alike", line.error,
                                 line.what, line.interface)
                     .c_str(),
                 stdout);
  }
  const BundleComparison::Line* first = comparison->first_difference();
  std::fputs(
      first == nullptr
          ? absl::StrFormat("%d things compared, all alike\n", comparison->lines.size()).c_str()
          : absl::StrFormat("first difference: %s (interface %s)\n", first->what, first->interface).c_str(),
      stdout);
  return first == nullptr ? kHealthy : kDifferent;
}

}  // namespace
}  // namespace dflash::doctor

int main(int argc, char** argv) {
  try {
    const std::string_view first = argc > 1 ? argv[1] : "";
    return dflash::doctor::CheckOutput(first == "record"    ? dflash::doctor::Record(argc - 1, argv + 1)
                                       : first == "compare" ? dflash::doctor::Compare(argc - 1, argv + 1)
                                                            : dflash::doctor::Examine(argc, argv));
  } catch (const std::exception& error) {  // last resort: out of memory
    std::fprintf(stderr, "dflash-doctor: %s\n", error.what());
    return dflash::doctor::kCannotRun;
  }
}
