#include "daemon/frontend/checkpoint_prompts.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "daemon/request/request_error.h"
#include "nlohmann/json.hpp"
#include "text/ordered_json.h"

namespace dflash {
namespace {

using Json = nlohmann::ordered_json;

// One JSON object of a client, within bounds.
absl::StatusOr<Json> ParseObject(const std::string& text, const std::string& field) {
  absl::StatusOr<Json> json = ParseOrderedJson(text, "JSON");
  if (!json.ok()) return BadParameter(field, std::string(json.status().message()));
  if (!json->is_object()) return BadParameter(field, "must be one JSON object");
  return json;
}

absl::StatusOr<Json> MessageJson(const ChatMessage& message, const std::string& field) {
  Json json = {{"role", message.role}, {"content", message.content}};
  if (message.reasoning_content) json["reasoning_content"] = *message.reasoning_content;
  for (size_t i = 0; i < message.tool_calls.size(); ++i) {
    const ToolCall& call = message.tool_calls[i];
    DFLASH_ASSIGN_OR_RETURN(
        Json arguments,
        ParseObject(call.arguments_json, absl::StrCat(field, ".tool_calls[", i, "].arguments_json")));
    json["tool_calls"].push_back(
        {{"type", "function"}, {"function", {{"name", call.name}, {"arguments", std::move(arguments)}}}});
  }
  return json;
}

// What the tokenizer cannot encode is a fault of the text, also where a pattern would backtrack for ever: the
// same text meets the same limit again.
absl::StatusOr<std::vector<int32_t>> OfField(absl::StatusOr<std::vector<int32_t>> ids,
                                             const std::string& field) {
  if (absl::IsInvalidArgument(ids.status()) || absl::IsResourceExhausted(ids.status()))
    return BadParameter(field, std::string(ids.status().message()));
  return ids;
}

}  // namespace

absl::StatusOr<CheckpointPrompts> CheckpointPrompts::Load(const std::string& folder) {
  DFLASH_ASSIGN_OR_RETURN(Tokenizer tokenizer, Tokenizer::Load(folder));
  DFLASH_ASSIGN_OR_RETURN(ChatTemplate chat_template, ChatTemplate::Load(folder));
  return CheckpointPrompts(std::move(tokenizer), std::move(chat_template));
}

absl::StatusOr<std::vector<int32_t>> CheckpointPrompts::EncodeText(const std::string& text) const {
  return OfField(tokenizer_.Encode(text, AddedTokens::kParse), "text");
}

absl::StatusOr<std::vector<int32_t>> CheckpointPrompts::EncodeChat(const ChatPrompt& chat,
                                                                   size_t max_bytes) const {
  DFLASH_ASSIGN_OR_RETURN(const RenderedChat rendered, Render(chat));
  if (rendered.text.size() > max_bytes)
    return absl::OutOfRangeError(absl::StrCat("the rendered prompt has ", rendered.text.size(), " bytes"));
  return OfField(tokenizer_.Encode(rendered.Segments()), "chat");
}

absl::StatusOr<std::string> CheckpointPrompts::RenderChat(const ChatPrompt& chat) const {
  DFLASH_ASSIGN_OR_RETURN(RenderedChat rendered, Render(chat));
  return std::move(rendered.text);
}

absl::StatusOr<RenderedChat> CheckpointPrompts::Render(const ChatPrompt& chat) const {
  Json messages = Json::array();
  for (size_t i = 0; i < chat.messages.size(); ++i) {
    DFLASH_ASSIGN_OR_RETURN(Json message,
                            MessageJson(chat.messages[i], absl::StrCat("chat.messages[", i, "]")));
    messages.push_back(std::move(message));
  }
  Json tools = nullptr;
  for (size_t i = 0; i < chat.tools_json.size(); ++i) {
    DFLASH_ASSIGN_OR_RETURN(Json tool,
                            ParseObject(chat.tools_json[i], absl::StrCat("chat.tools_json[", i, "]")));
    tools.push_back(std::move(tool));
  }
  ChatOptions options;
  options.add_generation_prompt = chat.add_generation_prompt;
  options.enable_thinking = chat.enable_thinking;
  if (chat.preserve_thinking) options.variables["preserve_thinking"] = *chat.preserve_thinking;
  absl::StatusOr<RenderedChat> rendered = template_.Render(messages, tools, options);
  if (rendered.ok()) return rendered;
  const absl::Status status = Annotate(rendered.status(), "chat");
  if (absl::IsUnimplemented(status)) {
    return WithDetails(status, {.reason = "UNSUPPORTED", .field = "chat", .retry_after = {}, .metadata = {}});
  }
  // The template's limits are met again by the same messages: that is no want of capacity.
  if (!absl::IsInvalidArgument(status) && !absl::IsResourceExhausted(status)) return status;
  return WithDetails(absl::InvalidArgumentError(status.message()),
                     {.reason = "TEMPLATE_ERROR", .field = "chat", .retry_after = {}, .metadata = {}});
}

}  // namespace dflash
