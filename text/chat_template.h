// A checkpoint's own chat template: turns a conversation into the text of a prompt
// (docs/spec/chat-template.md). What people wrote stays apart from what the template wrote, so that an added
// token spelt out in a message
// ("<|im_end|>") is encoded as letters and cannot close the turn.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "text/jinja/marked_text.h"
#include "text/jinja/runtime.h"
#include "text/jinja/template.h"
#include "text/tokenizer.h"

namespace dflash {

struct ChatOptions {
  // Opens the assistant's turn at the end of the prompt.
  bool add_generation_prompt = true;
  // The template variable of that name; unset, it is undefined and the template decides.
  std::optional<bool> enable_thinking;
  // More variables for the template, by name, such as {"preserve_thinking": true}; text in them counts as
  // content. An object, or null for none.
  nlohmann::ordered_json variables;
  // What the template's strftime_now shows.
  absl::Time now = absl::Now();
  absl::TimeZone time_zone = absl::LocalTimeZone();
};

struct RenderedChat {
  std::string text;
  // The bytes of `text` that come from messages, tools or variables: ascending, disjoint, none empty.
  std::vector<jinja::ByteRange> content;

  // The text in parts for Tokenizer::Encode: content as letters, the rest with added tokens parsed. Views of
  // `text`.
  std::vector<TextSegment> Segments() const;
};

// Immutable, usable from many threads at once.
class ChatTemplate {
 public:
  // Reads FOLDER/chat_template.jinja, or else the chat_template of FOLDER/tokenizer_config.json; the latter's
  // special tokens (bos_token, eos_token, ...) become variables. Errors, each naming the file: NotFound when
  // there is no template; those of Parse; Unimplemented for a list of named templates.
  static absl::StatusOr<ChatTemplate> Load(const std::string& folder, const jinja::Limits& limits = {});

  // `special_tokens` are variables whose text counts as the template's own: strings, or arrays of strings.
  // Errors: jinja::Template::Parse.
  static absl::StatusOr<ChatTemplate> Parse(std::string_view source, nlohmann::ordered_json special_tokens,
                                            const jinja::Limits& limits = {});

  // Renders `messages`, an array of objects: `role` (a string), `content` (a string or an array of parts of
  // type "text", which are joined; an assistant's may be missing and counts as empty), and whatever else the
  // template reads. Arguments of tool calls may be JSON text. `tools` is an array of objects, or null.
  // Errors: InvalidArgument naming the field of a malformed message ("messages[1].content[0].type" for an
  // image), or with the template's own words where it refuses the conversation; Unimplemented for a feature
  // of Jinja that is left out; ResourceExhausted naming the limit.
  absl::StatusOr<RenderedChat> Render(const nlohmann::ordered_json& messages,
                                      const nlohmann::ordered_json& tools, const ChatOptions& options) const;

 private:
  ChatTemplate(jinja::Template parsed, nlohmann::ordered_json special_tokens, const jinja::Limits& limits)
      : template_(std::move(parsed)), special_tokens_(std::move(special_tokens)), limits_(limits) {}

  jinja::Template template_;
  nlohmann::ordered_json special_tokens_;
  jinja::Limits limits_;
};

}  // namespace dflash
