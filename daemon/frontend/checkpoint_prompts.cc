#include "daemon/frontend/checkpoint_prompts.h"

#include <utility>

#include "base/status.h"
#include "daemon/request/request_error.h"
#include "nlohmann/json.hpp"

namespace dflash {
namespace {

using Json = nlohmann::ordered_json;

// The client's JSON was checked by CheckChat, so it parses.
Json ParseChecked(const std::string& text) { return Json::parse(text, nullptr, /*allow_exceptions=*/false); }

Json MessageJson(const ChatMessage& message) {
  Json json = {{"role", message.role}, {"content", message.content}};
  if (message.reasoning_content) json["reasoning_content"] = *message.reasoning_content;
  for (const ToolCall& call : message.tool_calls) {
    json["tool_calls"].push_back(
        {{"type", "function"},
         {"function", {{"name", call.name}, {"arguments", ParseChecked(call.arguments_json)}}}});
  }
  return json;
}

}  // namespace

absl::StatusOr<CheckpointPrompts> CheckpointPrompts::Load(const std::string& folder) {
  DFLASH_ASSIGN_OR_RETURN(Tokenizer tokenizer, Tokenizer::Load(folder));
  DFLASH_ASSIGN_OR_RETURN(ChatTemplate chat_template, ChatTemplate::Load(folder));
  return CheckpointPrompts(std::move(tokenizer), std::move(chat_template));
}

absl::StatusOr<std::vector<int32_t>> CheckpointPrompts::EncodeText(const std::string& text) const {
  return tokenizer_.Encode(text, AddedTokens::kParse);
}

absl::StatusOr<std::vector<int32_t>> CheckpointPrompts::EncodeChat(const ChatPrompt& chat) const {
  DFLASH_ASSIGN_OR_RETURN(const RenderedChat rendered, Render(chat));
  return tokenizer_.Encode(rendered.Segments());
}

absl::StatusOr<std::string> CheckpointPrompts::RenderChat(const ChatPrompt& chat) const {
  DFLASH_ASSIGN_OR_RETURN(RenderedChat rendered, Render(chat));
  return std::move(rendered.text);
}

absl::StatusOr<RenderedChat> CheckpointPrompts::Render(const ChatPrompt& chat) const {
  Json messages = Json::array();
  for (const ChatMessage& message : chat.messages) messages.push_back(MessageJson(message));
  Json tools = nullptr;
  for (const std::string& tool : chat.tools_json) tools.push_back(ParseChecked(tool));
  ChatOptions options;
  options.add_generation_prompt = chat.add_generation_prompt;
  options.enable_thinking = chat.enable_thinking;
  if (chat.preserve_thinking) options.variables["preserve_thinking"] = *chat.preserve_thinking;
  absl::StatusOr<RenderedChat> rendered = template_.Render(messages, tools, options);
  if (rendered.ok()) return rendered;
  const absl::StatusCode code = rendered.status().code();
  if (code == absl::StatusCode::kInternal) return rendered.status();
  return WithDetails(absl::Status(code, Annotate(rendered.status(), "chat").message()),
                     {.reason = "TEMPLATE_ERROR", .field = "chat", .retry_after = {}, .metadata = {}});
}

}  // namespace dflash
