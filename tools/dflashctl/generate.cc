// dflashctl generate: continues a raw prompt.
#include <cstdio>

#include "base/regular_file.h"
#include "base/status.h"
#include "tools/dflashctl/answer.h"
#include "tools/dflashctl/commands.h"
#include "tools/dflashctl/request_flags.h"

namespace dflash::ctl {
namespace {

constexpr int64_t kMaxPromptBytes = 7 << 20;  // the server takes messages of 8 MiB

struct PromptFlags {
  std::string text, text_file, tokens, tokens_file;

  void Register(FlagParser* parser) {
    parser->Text("prompt", "TEXT", "raw text; added tokens spelt out in it are recognised", &text);
    parser->Text("prompt-file", "FILE", "raw text from a file", &text_file);
    parser->Text("tokens", "IDS", "token ids, between commas or spaces", &tokens);
    parser->Text("tokens-file", "FILE", "token ids from a file", &tokens_file);
  }

  absl::Status Apply(const FlagParser& parser, v1::GenerateRequest* request) const {
    int given = 0;
    for (const char* name : {"prompt", "prompt-file", "tokens", "tokens-file"})
      given += parser.Given(name) ? 1 : 0;
    if (given != 1) {
      return absl::InvalidArgumentError("give one of --prompt, --prompt-file, --tokens and --tokens-file");
    }
    std::string content = parser.Given("prompt") ? text : tokens;
    std::string what = parser.Given("prompt") ? "--prompt" : "--tokens";
    for (const std::string& file : {text_file, tokens_file}) {
      if (file.empty()) continue;
      DFLASH_ASSIGN_OR_RETURN(content, ReadFile(file, kMaxPromptBytes));
      what = file;
    }
    if (parser.Given("prompt") || parser.Given("prompt-file")) {
      DFLASH_RETURN_IF_ERROR(CheckUtf8(content, what));
      request->set_text(content);
      return absl::OkStatus();
    }
    absl::StatusOr<v1::TokenIds> ids = ParseTokenIds(content);
    if (!ids.ok()) return Annotate(ids.status(), what);
    *request->mutable_tokens() = *std::move(ids);
    return absl::OkStatus();
  }
};

}  // namespace

int RunGenerate(int argc, const char* const* argv, Interrupt* interrupt) {
  EndpointFlags endpoint_flags;
  bool show_rounds = false, show_tokens = false, ignore_eos = false, special_tokens = false;
  PromptFlags prompt;
  RequestFlags flags;
  FlagParser parser(argv[0], "Continues a raw prompt.");
  endpoint_flags.Register(&parser);
  prompt.Register(&parser);
  parser.Switch("show-rounds", "shows where the text came from, as in chat", &show_rounds);
  parser.Switch("show-tokens", "prints the output's token ids after its text", &show_tokens);
  parser.Switch("special-tokens", "keeps special tokens in the text", &special_tokens);
  parser.Switch("ignore-eos", "goes on past the model's own end tokens", &ignore_eos);
  flags.Register(&parser);
  if (const std::optional<int> exit_code = ParseCommandLine(&parser, argc, argv)) return *exit_code;

  v1::GenerateRequest request;
  if (const absl::Status status = prompt.Apply(parser, &request); !status.ok()) return UsageError(status);
  flags.Apply(&request);
  request.mutable_stopping()->set_ignore_eos(ignore_eos);
  request.mutable_output()->set_text(true);
  request.mutable_output()->set_special_tokens_in_text(special_tokens);

  const absl::StatusOr<Endpoint> endpoint = endpoint_flags.Read();
  if (!endpoint.ok()) return UsageError(endpoint.status());
  Connection connection(*endpoint, interrupt);
  Generation answer;
  const grpc::Status status = StreamAnswer(&connection, request, {flags.timeout(), show_rounds}, &answer);
  if (!status.ok()) return ServerError(status, *interrupt);
  if (show_tokens) {
    for (size_t i = 0; i < answer.token_ids.size(); ++i)
      std::printf("%s%u", i == 0 ? "" : ",", answer.token_ids[i]);
    std::puts("");
  }
  return kSuccess;
}

}  // namespace dflash::ctl
