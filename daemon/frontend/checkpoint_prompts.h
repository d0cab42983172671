// Prompts as the checkpoint wants them: its tokenizer and its own chat template.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/frontend/prepare.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace dflash {

// Immutable after Load, usable from many threads at once.
class CheckpointPrompts final : public PromptEncoder {
 public:
  // Reads tokenizer and chat template of a model folder. Errors: those of Tokenizer::Load and
  // ChatTemplate::Load.
  static absl::StatusOr<CheckpointPrompts> Load(const std::string& folder);

  // Added tokens that are spelt out in a raw prompt are those tokens.
  absl::StatusOr<std::vector<int32_t>> EncodeText(const std::string& text) const override;
  // Added tokens that are spelt out in messages are letters; only the template's own count.
  absl::StatusOr<std::vector<int32_t>> EncodeChat(const ChatPrompt& chat, size_t max_bytes) const override;
  size_t MaxBytes(int64_t tokens) const override { return tokenizer_.MaxBytes(tokens); }
  std::optional<int32_t> FindToken(const std::string& content) const override {
    return tokenizer_.FindAddedToken(content);
  }
  // The prompt's text. Errors as EncodeChat, and as that one: InvalidArgument for tools or arguments of a
  // call that are no JSON object, naming the field.
  absl::StatusOr<std::string> RenderChat(const ChatPrompt& chat) const;

  const Tokenizer& tokenizer() const { return tokenizer_; }

 private:
  CheckpointPrompts(Tokenizer tokenizer, ChatTemplate chat_template)
      : tokenizer_(std::move(tokenizer)), template_(std::move(chat_template)) {}
  absl::StatusOr<RenderedChat> Render(const ChatPrompt& chat) const;

  Tokenizer tokenizer_;
  ChatTemplate template_;
};

}  // namespace dflash
