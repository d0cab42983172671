// Requests as a client's bytes, through everything that the daemon does with them before a worker sees them:
// parsing, conversion, checks, rendering, tokenizing. No sockets. Input: a method ('g' Generate, 't'
// Tokenize, 'r' RenderChat, 'd' Detokenize, 'c' Cancel), then its message: bytes as on the wire, or after a
// '#' in protobuf's text format.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/status.h"
#include "daemon/frontend/checkpoint_prompts.h"
#include "daemon/frontend/prepare.h"
#include "daemon/request/request_error.h"
#include "daemon/rpc/convert.h"
#include "daemon/rpc/grpc_status.h"
#include "daemon/rpc/message_bytes.h"
#include "dflash/v1/inference.pb.h"
#include "google/protobuf/stubs/logging.h"
#include "google/protobuf/text_format.h"
#include "text/grammar/json_grammar.h"

namespace dflash {
namespace {

const CheckpointPrompts& Prompts() {
  static const auto* const prompts =
      new CheckpointPrompts(*CheckpointPrompts::Load(DFLASHD_SOURCE_DIR "/models/tiny-qwen3.6"));
  return *prompts;
}

GroupInfo Group() {
  GroupInfo info;
  info.vocabulary_size = Prompts().tokenizer().vocabulary_size();
  info.max_context_tokens = 4096;
  info.max_sequences = 8;
  info.eos_token_ids = {4088, 4090};
  info.default_temperature = 0.6f;
  info.default_top_k = 20;
  info.default_top_p = 0.95f;
  return info;
}

// A refusal says which kind of error it is, in words and for programs, and becomes a status of gRPC.
void CheckError(const absl::Status& status) {
  if (status.ok()) return;
  static const std::set<std::pair<absl::StatusCode, std::string>> kKnown = {
      {absl::StatusCode::kInvalidArgument, "BAD_PARAMETER"},
      {absl::StatusCode::kInvalidArgument, "CONTEXT_TOO_LONG"},
      {absl::StatusCode::kInvalidArgument, "TEMPLATE_ERROR"},
      {absl::StatusCode::kUnimplemented, "UNSUPPORTED"},
      {absl::StatusCode::kNotFound, "MODEL_NOT_FOUND"},
      {absl::StatusCode::kAborted, "REVISION_MISMATCH"},
      {absl::StatusCode::kFailedPrecondition, "METHOD_NOT_LOADED"}};
  const ErrorDetails details = DetailsOf(status);
  DFLASH_CHECK(kKnown.contains({status.code(), details.reason}), status.ToString().c_str());
  DFLASH_CHECK(!status.message().empty());
  DFLASH_CHECK(details.field.empty() || status.message().find(details.field) != absl::string_view::npos,
               status.ToString().c_str());
  DFLASH_CHECK(!ToGrpcStatus(status).ok());
}

template <typename Message>
absl::StatusOr<Message> Parse(std::string_view input) {
  Message message;
  if (input.starts_with('#')) {
    Message from_text;
    google::protobuf::TextFormat::Parser parser;
    parser.AllowPartialMessage(true);
    (void)parser.ParseFromString(std::string(input.substr(1)), &from_text);  // what could be read, if not all
    const std::string bytes = from_text.SerializeAsString();
    DFLASH_RETURN_IF_ERROR(ParseRequest(bytes, &message));
    return message;
  }
  DFLASH_RETURN_IF_ERROR(ParseRequest(input, &message));
  return message;
}

absl::Status Generate(std::string_view input) {
  DFLASH_ASSIGN_OR_RETURN(const v1::GenerateRequest message, Parse<v1::GenerateRequest>(input));
  (void)OutputOptionsOf(message);
  DFLASH_ASSIGN_OR_RETURN(const ClientRequest request, FromMessage(message));
  DFLASH_RETURN_IF_ERROR(CheckRequestId(request.id));
  DFLASH_RETURN_IF_ERROR(CheckModel(request.model, "tiny"));
  static const GroupInfo info = Group();
  DFLASH_RETURN_IF_ERROR(CheckRequest(request, info));
  DFLASH_ASSIGN_OR_RETURN(const GroupRequest prepared, Prepare(request, info, Prompts(), 7));
  // What a worker may rely on.
  DFLASH_CHECK(!prepared.prompt_tokens.empty());
  for (const int32_t id : prepared.prompt_tokens) DFLASH_CHECK(id >= 0 && id < info.vocabulary_size);
  for (const int32_t id : prepared.stop_token_ids) DFLASH_CHECK(id >= 0 && id < info.vocabulary_size);
  DFLASH_CHECK(prepared.max_tokens >= 1);
  DFLASH_CHECK(prepared.max_tokens + static_cast<int64_t>(prepared.prompt_tokens.size()) <=
               info.max_context_tokens);
  DFLASH_CHECK(prepared.prompt_log_probs >= 0 && prepared.prompt_log_probs <= 21 &&
               prepared.prompt_log_probs * static_cast<int64_t>(prepared.prompt_tokens.size()) <=
                   RequestLimits::kMaxPromptLogProbs);
  DFLASH_CHECK(prepared.temperature >= 0 && prepared.temperature <= 100);
  DFLASH_CHECK(prepared.top_p > 0 && prepared.top_p <= 1 && prepared.min_p >= 0 && prepared.min_p <= 1);
  DFLASH_CHECK(prepared.top_k >= 0 && prepared.max_draft_tokens >= 0);
  for (const std::string& stop : prepared.stop_strings) DFLASH_CHECK(!stop.empty() && stop.size() <= 256);
  const auto exists = [&](int32_t id) { return id >= 0 && id < info.vocabulary_size; };
  std::set<int32_t> biased;
  for (const TokenBias& bias : prepared.logit_bias)
    DFLASH_CHECK(exists(bias.token) && biased.insert(bias.token).second && std::abs(bias.bias) <= 100);
  for (const std::vector<int32_t>& word : prepared.bad_words)
    DFLASH_CHECK(!word.empty() && word.size() <= 32 && std::all_of(word.begin(), word.end(), exists));
  DFLASH_CHECK(biased.size() <= 1024 && prepared.bad_words.size() <= 64);
  DFLASH_CHECK(prepared.repetition_penalty > 0 && prepared.repetition_penalty <= 10);
  DFLASH_CHECK(std::abs(prepared.frequency_penalty) <= 2 && std::abs(prepared.presence_penalty) <= 2);
  DFLASH_CHECK(prepared.min_tokens >= 0 && prepared.min_tokens <= prepared.max_tokens);
  DFLASH_CHECK(prepared.log_probs >= 0 && prepared.log_probs <= 21);
  DFLASH_CHECK(prepared.thinking.max_tokens == -1 ||
               (prepared.thinking.max_tokens >= 0 && exists(prepared.thinking.open) &&
                exists(prepared.thinking.close)));
  DFLASH_CHECK(std::all_of(prepared.output_tokens.begin(), prepared.output_tokens.end(), exists));
  if (!prepared.language.json_schema.empty()) DFLASH_CHECK(ConformsTo(prepared.language.json_schema).ok());
  return absl::OkStatus();
}

absl::Status Chat(const v1::ChatPrompt& message) {
  DFLASH_ASSIGN_OR_RETURN(const ChatPrompt chat, FromMessage(message));
  DFLASH_RETURN_IF_ERROR(CheckChat(chat, "chat"));
  DFLASH_ASSIGN_OR_RETURN(const std::string text, Prompts().RenderChat(chat));
  DFLASH_ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                          Prompts().EncodeChat(chat, Tokenizer::kMaxTextBytes));
  // The turn's end is the template's to write: as often as the text of a chat with harmless words has it.
  static const int32_t end = *Prompts().tokenizer().FindAddedToken("<|im_end|>");
  const auto ends = std::count(ids.begin(), ids.end(), end);
  DFLASH_CHECK(ends <= static_cast<int64_t>(chat.messages.size()) + 1, text.c_str());
  return absl::OkStatus();
}

absl::Status Run(char method, std::string_view input) {
  switch (method) {
    case 'g':
      return Generate(input);
    case 't': {
      DFLASH_ASSIGN_OR_RETURN(const v1::TokenizeRequest message, Parse<v1::TokenizeRequest>(input));
      if (message.has_chat()) return Chat(message.chat());
      return Prompts().EncodeText(message.text()).status();
    }
    case 'r': {
      DFLASH_ASSIGN_OR_RETURN(const v1::RenderChatRequest message, Parse<v1::RenderChatRequest>(input));
      return Chat(message.chat());
    }
    case 'd':
      return Parse<v1::DetokenizeRequest>(input).status();
    default:
      return Parse<v1::CancelRequest>(input).status();
  }
}

}  // namespace
}  // namespace dflash

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  google::protobuf::SetLogHandler(nullptr);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  dflash::CheckError(dflash::Run(static_cast<char>(data[0]),
                                 std::string_view(reinterpret_cast<const char*>(data) + 1, size - 1)));
  return 0;
}
