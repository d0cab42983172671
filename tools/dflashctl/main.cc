// dflashctl: client and operator's tool of dflashd.
#include <cstdio>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "tools/dflashctl/commands.h"

namespace dflash::ctl {
namespace {

constexpr char kHelp[] =
    "Usage: dflashctl [--address HOST:PORT] COMMAND [flags]\n"
    "\n"
    "  chat         talk with the model, or ask one question with --message\n"
    "  generate     continue a raw prompt: text or token ids\n"
    "  status       what is served, feature contract, load, speculation\n"
    "  top          the load, live: rates, slots, pages, acceptance by depth\n"
    "  replay FILE  compare outputs and acceptance lengths with golden data\n"
    "  bench        speed without and with speculation, or under load (--mode)\n"
    "  drain        let a server finish and take nothing new; resume takes it back\n"
    "  speculation  show or change what new requests get\n"
    "  log-level L  change how much a server logs\n"
    "  doctor       which interface between target and drafter diverges, and why\n"
    "  golden       record a golden bundle (golden record), or compare two (golden compare)\n"
    "\n"
    "  --address HOST:PORT   where dflashd listens (default 127.0.0.1:8500); also after the command\n"
    "  --version, --help     COMMAND --help lists the command's own flags\n"
    "\n"
    "Exit codes: 0 success; 1 replay, doctor or golden found a difference; 2 wrong usage or bad file; 3 the\n"
    "server cannot be reached, cannot serve or answered with an error; 4 standard output cannot be written;\n"
    "5 doctor: the drafter is bad; 6 doctor: the integration or the drafter; 130 interrupted.\n"
    "Ctrl-C cancels what runs.\n";

struct Command {
  std::string_view name;
  int (*run)(int argc, const char* const* argv, Interrupt* interrupt);
};
constexpr Command kCommands[] = {{"chat", RunChat},
                                 {"generate", RunGenerate},
                                 {"status", RunStatus},
                                 {"top", RunTop},
                                 {"replay", RunReplay},
                                 {"bench", RunBench},
                                 {"drain", RunDrain},
                                 {"resume", RunResume},
                                 {"speculation", RunSpeculation},
                                 {"log-level", RunLogLevel},
                                 {"doctor", RunDoctor},
                                 {"golden", RunGolden}};

int Usage(const std::string& what) {
  std::fprintf(stderr, "dflashctl: %s\nTry: dflashctl --help\n", what.c_str());
  return kUsage;
}

int Main(int argc, const char* const* argv) {
  // Before the command only --address may stand; it is handed on.
  std::vector<std::string> before;
  int i = 1;
  for (; i < argc && argv[i][0] == '-'; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--help" || argument == "-h") {
      std::fputs(kHelp, stdout);
      return kSuccess;
    }
    if (argument == "--version") {
      std::puts("dflashctl " DFLASHD_VERSION);
      return kSuccess;
    }
    if (argument.starts_with("--address=")) {
      before.emplace_back(argument);
    } else if (argument == "--address" && i + 1 < argc) {
      before.emplace_back(argument);
      before.emplace_back(argv[++i]);
    } else {
      return Usage(argument == "--address" ? "--address needs a value"
                                           : "unknown flag " + std::string(argument) + " before the command");
    }
  }
  if (i == argc) return Usage("no command");
  for (const Command& command : kCommands) {
    if (command.name != argv[i]) continue;
    const std::string program = "dflashctl " + std::string(command.name);
    std::vector<const char*> arguments = {program.c_str()};
    for (const std::string& argument : before) arguments.push_back(argument.c_str());
    arguments.insert(arguments.end(), argv + i + 1, argv + argc);
    Interrupt interrupt;  // before the first gRPC thread
    return command.run(static_cast<int>(arguments.size()), arguments.data(), &interrupt);
  }
  return Usage("unknown command " + std::string(argv[i]));
}

// What was printed counts only when it has arrived: a full disk shows at the latest here.
int CheckOutput(int exit_code) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return exit_code;
  std::fputs("error: standard output cannot be written\n", stderr);
  return exit_code == kSuccess ? kOutputLost : exit_code;
}

}  // namespace
}  // namespace dflash::ctl

int main(int argc, char** argv) {
  try {
    return dflash::ctl::CheckOutput(dflash::ctl::Main(argc, argv));
  } catch (const std::exception& error) {  // last resort: out of memory
    std::fprintf(stderr, "dflashctl: %s\n", error.what());
    return dflash::ctl::kServerError;
  }
}
