// dflashctl chat: a conversation, line by line, or one message.
#include <unistd.h>

#include <cstdio>
#include <iostream>

#include "tools/dflashctl/answer.h"
#include "tools/dflashctl/commands.h"
#include "tools/dflashctl/request_flags.h"

namespace dflash::ctl {
namespace {

class Conversation {
 public:
  Conversation(Connection* connection, const RequestFlags& flags, bool no_thinking, bool show_rounds)
      : connection_(connection), options_{flags.timeout(), show_rounds} {
    flags.Apply(&request_);
    request_.mutable_output()->set_text(true);
    if (no_thinking) request_.mutable_chat()->set_enable_thinking(false);
  }

  void SetSystem(const std::string& text) {
    system_ = text;
    Reset();
  }

  // Forgets everything but the system message.
  void Reset() {
    request_.mutable_chat()->clear_messages();
    if (!system_.empty()) Add("system", system_);
  }

  // Asks and prints the answer. The turn stays in the history only when the answer came whole.
  grpc::Status Ask(const std::string& message) {
    Add("user", message);
    Generation answer;
    const grpc::Status status = StreamAnswer(connection_, request_, options_, &answer);
    if (status.ok()) {
      Add("assistant", answer.text);
    } else {
      request_.mutable_chat()->mutable_messages()->RemoveLast();
    }
    return status;
  }

 private:
  void Add(const char* role, const std::string& content) {
    v1::ChatMessage* message = request_.mutable_chat()->add_messages();
    message->set_role(role);
    message->set_content(content);
  }

  Connection* const connection_;
  const AnswerOptions options_;
  std::string system_;
  v1::GenerateRequest request_;  // its chat is the history
};

int Interact(Conversation* conversation, Interrupt* interrupt) {
  const bool terminal = isatty(STDIN_FILENO) != 0;
  int exit_code = kSuccess;
  if (terminal) std::puts("/reset forgets the conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer.");
  for (std::string line;;) {
    if (terminal) {
      std::fputs("> ", stdout);
      std::fflush(stdout);
    }
    if (!std::getline(std::cin, line)) break;
    if (line.empty()) continue;
    if (line == "/quit") break;
    if (line == "/reset") {
      conversation->Reset();
      continue;
    }
    if (line.front() == '/') {
      std::fprintf(stderr, "error: no command %s; there are /reset and /quit\n", line.c_str());
      continue;
    }
    if (const absl::Status valid = CheckUtf8(line, "the message"); !valid.ok()) {
      exit_code = UsageError(valid);
      continue;
    }
    const grpc::Status status = conversation->Ask(line);
    if (!status.ok()) exit_code = ServerError(status, *interrupt);
    if (!terminal && exit_code != kSuccess) break;  // a script must see its failure
    interrupt->Reset();
  }
  return terminal ? kSuccess : exit_code;
}

}  // namespace

int RunChat(int argc, const char* const* argv, Interrupt* interrupt) {
  EndpointFlags endpoint_flags;
  std::string message, system;
  bool no_thinking = false, show_rounds = false;
  RequestFlags flags;
  FlagParser parser(
      argv[0], "Talks with the model. Reads one message a line; without a terminal the first error ends it.");
  endpoint_flags.Register(&parser);
  parser.Text("message", "TEXT", "asks this one question and ends", &message);
  parser.Text("system", "TEXT", "system message", &system);
  parser.Switch("no-thinking", "asks the chat template for an answer without reasoning", &no_thinking);
  parser.Switch(
      "show-rounds",
      "shows where the text came from: drafts green, corrections yellow (no terminal: drafts in «»)",
      &show_rounds);
  flags.Register(&parser);
  if (const std::optional<int> exit_code = ParseCommandLine(&parser, argc, argv)) return *exit_code;
  if (const absl::Status valid = CheckUtf8(message, "--message"); !valid.ok()) return UsageError(valid);
  if (const absl::Status valid = CheckUtf8(system, "--system"); !valid.ok()) return UsageError(valid);

  const absl::StatusOr<Endpoint> endpoint = endpoint_flags.Read();
  if (!endpoint.ok()) return UsageError(endpoint.status());
  Connection connection(*endpoint, interrupt);
  Conversation conversation(&connection, flags, no_thinking, show_rounds);
  conversation.SetSystem(system);
  if (!parser.Given("message")) return Interact(&conversation, interrupt);
  const grpc::Status status = conversation.Ask(message);
  return status.ok() ? kSuccess : ServerError(status, *interrupt);
}

}  // namespace dflash::ctl
