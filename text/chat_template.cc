#include "text/chat_template.h"

#include <optional>

#include "base/json_value.h"
#include "base/regular_file.h"
#include "base/status.h"
#include "text/jinja/json_values.h"
#include "text/ordered_json.h"

namespace dflash {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMaxConfigBytes = int64_t{16} << 20;

absl::Status Invalid(const std::string& field, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": ", what));
}

// What a file says; nullopt when there is none. Errors of ReadFile.
absl::StatusOr<std::optional<std::string>> ReadIfAny(const std::string& path, int64_t max_bytes) {
  absl::StatusOr<std::string> text = ReadFile(path, max_bytes);
  if (absl::IsNotFound(text.status())) return std::nullopt;
  DFLASH_RETURN_IF_ERROR(text.status());
  return *std::move(text);
}

// The special tokens of a tokenizer_config.json: text, or an object that holds it as `content`.
Json SpecialTokensOf(const JsonValue& config) {
  const auto text_of = [](const JsonValue& value) -> std::optional<std::string> {
    if (value.kind == JsonValue::Kind::kString) return value.string;
    const JsonValue* content = value.kind == JsonValue::Kind::kObject ? value.Find("content") : nullptr;
    if (content == nullptr || content->kind != JsonValue::Kind::kString) return std::nullopt;
    return content->string;
  };
  Json tokens = Json::object();
  for (const char* name :
       {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}) {
    const JsonValue* value = config.Find(name);
    if (value == nullptr) continue;
    if (const std::optional<std::string> text = text_of(*value); text.has_value() && !text->empty()) {
      tokens[name] = *text;
    }
  }
  const JsonValue* more = config.Find("additional_special_tokens");
  if (more != nullptr && !more->elements.empty()) {
    Json list = Json::array();
    for (const JsonValue& element : more->elements) list.push_back(text_of(element).value_or(""));
    tokens["additional_special_tokens"] = std::move(list);
  }
  return tokens;
}

// The text of a message's content: templates differ in whether they can walk parts, so they all get one
// string.
absl::StatusOr<std::string> JoinParts(const Json& parts, const std::string& field) {
  std::string text;
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string part = absl::StrCat(field, "[", i, "]");
    if (!parts[i].is_object()) return Invalid(part, "must be an object");
    const auto type = parts[i].find("type");
    if (type == parts[i].end() || !type->is_string()) return Invalid(part + ".type", "must be a string");
    if (*type != "text") {
      return Invalid(part + ".type", absl::StrCat("\"", Printable(type->get_ref<const std::string&>()),
                                                  "\" is not supported, this server takes text only"));
    }
    const auto value = parts[i].find("text");
    if (value == parts[i].end() || !value->is_string()) return Invalid(part + ".text", "must be a string");
    text += value->get_ref<const std::string&>();
  }
  return text;
}

// Arguments as an object: clients of OpenAI's interface send them as JSON text.
absl::Status ParseArguments(Json& message, const std::string& field) {
  const auto calls = message.find("tool_calls");
  if (calls == message.end() || calls->is_null()) return absl::OkStatus();
  if (!calls->is_array()) return Invalid(field + ".tool_calls", "must be an array");
  for (size_t i = 0; i < calls->size(); ++i) {
    std::string where = absl::StrCat(field, ".tool_calls[", i, "]");
    Json* call = &(*calls)[i];
    if (!call->is_object()) return Invalid(where, "must be an object");
    if (const auto function = call->find("function"); function != call->end()) {
      where += ".function";
      call = &*function;
      if (!call->is_object()) return Invalid(where, "must be an object");
    }
    const auto arguments = call->find("arguments");
    if (arguments == call->end() || arguments->is_object()) continue;
    where += ".arguments";
    if (!arguments->is_string()) return Invalid(where, "must be an object, or the text of one");
    const std::string& text = arguments->get_ref<const std::string&>();
    DFLASH_ASSIGN_OR_RETURN(Json parsed, ParseOrderedJson(text.empty() ? "{}" : text, where));
    if (!parsed.is_object()) return Invalid(where, "must be the text of an object");
    *arguments = std::move(parsed);
  }
  return absl::OkStatus();
}

absl::StatusOr<Json> CheckMessages(const Json& messages) {
  if (!messages.is_array() || messages.empty()) return Invalid("messages", "must be an array with a message");
  Json checked = messages;
  for (size_t i = 0; i < checked.size(); ++i) {
    const std::string field = absl::StrCat("messages[", i, "]");
    Json& message = checked[i];
    if (!message.is_object()) return Invalid(field, "must be an object");
    const auto role = message.find("role");
    if (role == message.end() || !role->is_string() || role->get_ref<const std::string&>().empty()) {
      return Invalid(field + ".role", "must be a string that is not empty");
    }
    const auto content = message.find("content");
    if (content == message.end() || content->is_null()) {
      // With calls there is often none. Some templates would print None, others fail.
      if (*role != "assistant") return Invalid(field + ".content", "missing");
      message["content"] = "";
    } else if (content->is_array()) {
      DFLASH_ASSIGN_OR_RETURN(*content, JoinParts(*content, field + ".content"));
    } else if (!content->is_string()) {
      return Invalid(field + ".content", "must be a string or an array of parts");
    }
    DFLASH_RETURN_IF_ERROR(ParseArguments(message, field));
  }
  return checked;
}

absl::Status CheckTools(const Json& tools) {
  if (tools.is_null()) return absl::OkStatus();
  if (!tools.is_array()) return Invalid("tools", "must be an array");
  for (size_t i = 0; i < tools.size(); ++i) {
    if (!tools[i].is_object()) return Invalid(absl::StrCat("tools[", i, "]"), "must be an object");
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<TextSegment> RenderedChat::Segments() const {
  std::vector<TextSegment> segments;
  const std::string_view view = text;
  size_t done = 0;
  for (const jinja::ByteRange& range : content) {
    if (done < range.begin) segments.push_back({view.substr(done, range.begin - done), AddedTokens::kParse});
    segments.push_back({view.substr(range.begin, range.end - range.begin), AddedTokens::kAsText});
    done = range.end;
  }
  if (done < view.size()) segments.push_back({view.substr(done), AddedTokens::kParse});
  return segments;
}

absl::StatusOr<ChatTemplate> ChatTemplate::Load(const std::string& folder, const jinja::Limits& limits) {
  std::string origin = folder + "/chat_template.jinja";
  const std::string config_path = folder + "/tokenizer_config.json";
  DFLASH_ASSIGN_OR_RETURN(std::optional<std::string> source,
                          ReadIfAny(origin, static_cast<int64_t>(limits.max_template_bytes)));
  Json special_tokens;
  DFLASH_ASSIGN_OR_RETURN(const std::optional<std::string> config_text,
                          ReadIfAny(config_path, kMaxConfigBytes));
  if (config_text.has_value()) {
    DFLASH_ASSIGN_OR_RETURN(const JsonValue config,
                            ParseJson(*config_text, config_path, JsonLimits{.max_bytes = kMaxConfigBytes}));
    special_tokens = SpecialTokensOf(config);
    const JsonValue* inline_source =
        config.kind == JsonValue::Kind::kObject ? config.Find("chat_template") : nullptr;
    if (!source.has_value() && inline_source != nullptr && inline_source->kind != JsonValue::Kind::kNull) {
      origin = config_path + ": chat_template";
      if (inline_source->kind != JsonValue::Kind::kString) {
        return absl::UnimplementedError(absl::StrCat(origin, ": a list of named templates is not supported"));
      }
      source = inline_source->string;
    }
  }
  if (!source.has_value()) {
    return absl::NotFoundError(absl::StrCat("no chat template: neither ", folder, "/chat_template.jinja nor ",
                                            config_path, ": chat_template"));
  }
  absl::StatusOr<ChatTemplate> parsed = Parse(*source, std::move(special_tokens), limits);
  if (!parsed.ok()) return Annotate(parsed.status(), origin);
  return parsed;
}

absl::StatusOr<ChatTemplate> ChatTemplate::Parse(std::string_view source, Json special_tokens,
                                                 const jinja::Limits& limits) {
  DFLASH_ASSIGN_OR_RETURN(jinja::Template parsed, jinja::Template::Parse(source, limits));
  return ChatTemplate(std::move(parsed), std::move(special_tokens), limits);
}

absl::StatusOr<RenderedChat> ChatTemplate::Render(const Json& messages, const Json& tools,
                                                  const ChatOptions& options) const {
  DFLASH_ASSIGN_OR_RETURN(const Json checked, CheckMessages(messages));
  DFLASH_RETURN_IF_ERROR(CheckTools(tools));
  if (!options.variables.is_null() && !options.variables.is_object()) {
    return Invalid("variables", "must be an object");
  }

  jinja::Runtime runtime(limits_, options.now, options.time_zone);
  std::vector<std::pair<std::string, jinja::Value>> variables;
  const auto add = [&](const std::string& name, const Json& value, bool is_content) -> absl::Status {
    DFLASH_ASSIGN_OR_RETURN(jinja::Value converted, jinja::FromJson(runtime, name, value, is_content));
    variables.emplace_back(name, std::move(converted));
    return absl::OkStatus();
  };
  DFLASH_RETURN_IF_ERROR(add("messages", checked, /*is_content=*/true));
  DFLASH_RETURN_IF_ERROR(add("tools", tools, /*is_content=*/true));
  DFLASH_RETURN_IF_ERROR(add("documents", Json(), /*is_content=*/false));
  DFLASH_RETURN_IF_ERROR(add("add_generation_prompt", options.add_generation_prompt, /*is_content=*/false));
  if (options.enable_thinking.has_value()) {
    DFLASH_RETURN_IF_ERROR(add("enable_thinking", *options.enable_thinking, /*is_content=*/false));
  }
  for (const auto& [name, value] : options.variables.items()) {
    for (const auto& variable : variables) {
      if (variable.first == name) return Invalid("variables." + name, "has an option or a field of its own");
    }
    DFLASH_RETURN_IF_ERROR(add(name, value, /*is_content=*/true));
  }
  for (const auto& [name, value] : special_tokens_.items()) {
    if (!options.variables.contains(name)) DFLASH_RETURN_IF_ERROR(add(name, value, /*is_content=*/false));
  }

  const absl::StatusOr<jinja::MarkedText> rendered = template_.Render(runtime, std::move(variables));
  if (!rendered.ok()) return Annotate(rendered.status(), "chat template");
  return RenderedChat{std::string(rendered->bytes()), rendered->content()};
}

}  // namespace dflash
