// dflashctl doctor, dflashctl golden. With model folders they run the doctor's program of the chosen backend,
// which stays in front of the terminal in our place; without, the doctor asks a running server.
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "tools/dflashctl/commands.h"
#include "tools/dflashctl/golden_record.h"
#include "tools/dflashctl/live_doctor.h"

namespace dflash::ctl {
namespace {

// Programs lie side by side when installed, in neighbouring folders when built.
std::string FindProgram(const std::string& name) {
  std::error_code error;
  const std::filesystem::path here = std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
  for (const std::filesystem::path& folder : {here, here.parent_path() / "doctor"}) {
    if (std::filesystem::exists(folder / name, error)) return folder / name;
  }
  return {};
}

// Whether the program finds its device.
bool Probe(const std::string& program) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  for (const int descriptor : {STDOUT_FILENO, STDERR_FILENO})
    posix_spawn_file_actions_addopen(&actions, descriptor, "/dev/null", O_WRONLY, 0);
  std::string name = program, flag = "--probe";
  char* const argv[] = {name.data(), flag.data(), nullptr};
  pid_t child = 0;
  const bool started = posix_spawn(&child, program.c_str(), &actions, nullptr, argv, environ) == 0;
  posix_spawn_file_actions_destroy(&actions);
  int status = 0;
  return started && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

int Usage(const std::string& what) {
  std::fprintf(stderr, "dflashctl doctor: %s\nTry: dflashctl doctor --help\n", what.c_str());
  return kUsage;
}

// Replaces this process. Returns only when that fails.
int Become(const std::string& backend, const std::vector<std::string>& arguments) {
  std::string program;
  if (backend != "cpu") {
    program = FindProgram("dflash-doctor-cuda");
    if (!program.empty() && !Probe(program)) program.clear();
    if (program.empty() && backend == "cuda")
      return Usage("--backend cuda: no dflash-doctor-cuda here that finds a GPU");
  }
  if (program.empty()) program = FindProgram("dflash-doctor");
  if (program.empty()) return Usage("dflash-doctor is not beside this program");
  std::vector<std::string> words = {program};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  sigset_t signals;  // ours are blocked (Interrupt); the program's shall end it
  sigemptyset(&signals);
  for (const int number : {SIGINT, SIGTERM}) sigaddset(&signals, number);
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  std::fflush(stdout);
  execv(program.c_str(), argv.data());
  return Usage(program + ": " + std::strerror(errno));
}

// The flags after the command, --backend taken out of them. nullopt: it has no legal value.
std::optional<std::vector<std::string>> TakeBackend(int argc, const char* const* argv, std::string* backend) {
  std::vector<std::string> rest;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    constexpr std::string_view kFlag = "--backend";
    if (argument == kFlag && i + 1 < argc) {
      *backend = argv[++i];
    } else if (argument.starts_with("--backend=")) {
      *backend = argument.substr(kFlag.size() + 1);
    } else {
      rest.emplace_back(argument);
      continue;
    }
    if (*backend != "auto" && *backend != "cpu" && *backend != "cuda") return std::nullopt;
  }
  return rest;
}

// Through the public API of a running server.
int AskServer(const std::vector<std::string>& arguments, Interrupt* interrupt) {
  EndpointFlags endpoint_flags;
  std::string golden, admin_address, colour = "auto";
  int64_t max_prompts = 21;
  bool json = false;
  FlagParser parser(
      "dflashctl doctor",
      "Says which interface between target and drafter diverges, and why.\n"
      "  dflashctl doctor --golden DIR [--address HOST:PORT] [--admin-address ADDRESS]: of a running "
      "server.\n"
      "  dflashctl doctor --model DIR --draft-model DIR [--golden DIR] [--backend auto|cpu|cuda]: of a "
      "pair,\n"
      "  stage by stage; more flags: dflashctl doctor --model DIR --help.");
  endpoint_flags.Register(&parser);
  parser.Text("golden", "DIR", "golden bundle of the served pair (docs/golden-bundle.md)", &golden);
  parser.Text("admin-address", "ADDRESS",
              "the server's --admin-listen: also what the server knows about itself (revisions, contracts in "
              "force, coverage, counters, calibration)",
              &admin_address);
  parser.Integer("max-prompts", "N", "golden prompts that are generated", 1, 4096, &max_prompts);
  parser.Switch("json", "prints the report as JSON", &json);
  parser.Choice("color", {"auto", "always", "never"}, "colours; auto: when a terminal reads", &colour);
  std::vector<const char*> argv = {"dflashctl doctor"};
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  if (const std::optional<int> code = ParseCommandLine(&parser, static_cast<int>(argv.size()), argv.data()))
    return *code;
  const auto failed = [&](std::string_view error, int exit_code) {
    if (json) std::fputs(doctor::ErrorJson(error, exit_code).c_str(), stdout);
    return exit_code;
  };
  const auto bad_input = [&](const absl::Status& status) {
    return failed(std::string(status.message()), UsageError(status));
  };
  if (golden.empty()) {
    constexpr char kRequired[] = "--golden DIR, or --model DIR and --draft-model DIR, is required";
    return failed(kRequired, Usage(kRequired));
  }
  const absl::StatusOr<golden::GoldenBundle> bundle = golden::GoldenBundle::Open(golden);
  if (!bundle.ok()) return bad_input(bundle.status());
  const absl::StatusOr<Endpoint> endpoint = endpoint_flags.Read();
  if (!endpoint.ok()) return bad_input(endpoint.status());
  Connection connection(*endpoint, interrupt);
  doctor::Report report;
  report.facts.emplace_back("server", endpoint->address);
  Endpoint admin = *endpoint;
  admin.address = admin_address;
  const grpc::Status status =
      ExamineServer(connection, admin_address.empty() ? nullptr : &admin, *bundle, max_prompts, &report);
  if (!status.ok()) return failed(Describe(status), ServerError(status, *interrupt));
  const bool colours = colour == "always" || (colour == "auto" && isatty(STDOUT_FILENO) == 1);
  std::fputs((json ? report.ToJson() : report.ToText(colours)).c_str(), stdout);
  return report.ExitCode();
}

// What a running server generates, as a golden bundle.
int RecordFromServer(const std::vector<std::string>& arguments, Interrupt* interrupt) {
  EndpointFlags endpoint_flags;
  std::string golden, admin_address, out;
  int64_t max_tokens = 128;
  FlagParser parser(
      "dflashctl golden record",
      "Writes what a running server generates for the prompts of a bundle as a golden bundle: tokens and "
      "acceptance, no tensors.\n"
      "With it another server is compared with this one: dflashctl doctor --golden OUT --address OTHER.\n"
      "With --model DIR --draft-model DIR instead of --address the tensors of a pair; see dflashctl golden "
      "record --model DIR --help.");
  endpoint_flags.Register(&parser);
  parser.Text("golden", "DIR", "golden bundle with the prompts", &golden);
  parser.Text("admin-address", "ADDRESS", "the server's --admin-listen: also the fingerprints of its weights",
              &admin_address);
  parser.Text("out", "DIR", "new folder for the bundle", &out);
  parser.Integer("max-tokens", "N", "tokens of an output", 1, 65536, &max_tokens);
  std::vector<const char*> argv = {"dflashctl golden record"};
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  if (const std::optional<int> code = ParseCommandLine(&parser, static_cast<int>(argv.size()), argv.data()))
    return *code;
  if (golden.empty() || out.empty()) return Usage("golden record: --golden DIR and --out DIR are required");
  // Before anything is generated.
  if (std::error_code error; std::filesystem::exists(out, error))
    return UsageError(absl::AlreadyExistsError("--out: " + out + " exists"));
  const absl::StatusOr<golden::GoldenBundle> bundle = golden::GoldenBundle::Open(golden);
  if (!bundle.ok()) return UsageError(bundle.status());
  const absl::StatusOr<Endpoint> endpoint = endpoint_flags.Read();
  if (!endpoint.ok()) return UsageError(endpoint.status());
  Connection connection(*endpoint, interrupt);
  Endpoint admin = *endpoint;
  admin.address = admin_address;
  int64_t left_out = 0, cut = 0;
  const grpc::Status status = RecordServer(connection, admin_address.empty() ? nullptr : &admin, *bundle,
                                           max_tokens, out, &left_out, &cut);
  if (!status.ok()) return ServerError(status, *interrupt);
  if (left_out > 0)
    std::fprintf(stderr, "%lld prompts do not fit into the server's context: left out\n",
                 static_cast<long long>(left_out));
  if (cut > 0)
    std::fprintf(
        stderr,
        "%lld prompts are recorded without acceptance: the server cuts their blocks (--max-verify-rows, "
        "or a limit on drafts)\n",
        static_cast<long long>(cut));
  return kSuccess;
}

}  // namespace

int RunDoctor(int argc, const char* const* argv, Interrupt* interrupt) {
  std::string backend = "auto";
  const std::optional<std::vector<std::string>> rest = TakeBackend(argc, argv, &backend);
  if (!rest) return Usage("--backend must be one of auto, cpu, cuda");
  for (const std::string& argument : *rest) {
    if (argument == "record" || argument == "compare") return Usage("see dflashctl golden");
  }
  for (const std::string& argument : *rest) {
    if (argument.starts_with("--model") || argument.starts_with("--draft-model"))
      return Become(backend, *rest);
  }
  return AskServer(*rest, interrupt);
}

int RunGolden(int argc, const char* const* argv, Interrupt* interrupt) {
  std::string backend = "cpu";  // what is recorded is a reference
  std::optional<std::vector<std::string>> rest = TakeBackend(argc, argv, &backend);
  if (!rest) return Usage("--backend must be one of auto, cpu, cuda");
  // `dflashctl --address HOST:PORT golden record` hands the address on before the rest.
  if (rest->size() > 1 && rest->at(0) == "--address") {
    std::rotate(rest->begin(), rest->begin() + 2, rest->end());
  } else if (!rest->empty() && rest->at(0).starts_with("--address=")) {
    std::rotate(rest->begin(), rest->begin() + 1, rest->end());
  }
  if (rest->empty() || (rest->at(0) != "record" && rest->at(0) != "compare")) {
    std::fputs(
        "Usage: dflashctl golden record|compare [flags]; each has --help (record --address HOST:PORT --help: "
        "of a running server)\n",
        stderr);
    return kUsage;
  }
  const bool of_server = std::any_of(rest->begin(), rest->end(), [](const std::string& argument) {
    return argument == "--address" || argument.starts_with("--address=");
  });
  if (rest->at(0) == "record" && of_server)
    return RecordFromServer({rest->begin() + 1, rest->end()}, interrupt);
  return Become(backend, *rest);
}

}  // namespace dflash::ctl
