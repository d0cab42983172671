#include "text/chat_output.h"

#include <algorithm>
#include <utility>

#include "text/ordered_json.h"

namespace dflash {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kReasoning = "<think>", kReasoningEnd = "</think>", kCall = "<tool_call>",
                           kCallEnd = "</tool_call>";

// The first mark in the text, or the first place from which on it may become one.
struct Found {
  size_t begin = std::string_view::npos;
  std::string_view mark;  // empty: what follows may become one
};
Found FindMark(std::string_view text, std::initializer_list<std::string_view> marks) {
  for (size_t begin = text.find('<'); begin != std::string_view::npos; begin = text.find('<', begin + 1)) {
    const std::string_view rest = text.substr(begin);
    for (const std::string_view mark : marks) {
      if (rest.starts_with(mark)) return {begin, mark};
    }
    for (const std::string_view mark : marks) {
      if (mark.starts_with(rest)) return {begin, {}};
    }
  }
  return {};
}

std::string_view Trim(std::string_view text) {
  while (!text.empty() && (text.front() == '\n' || text.front() == ' ' || text.front() == '\r'))
    text.remove_prefix(1);
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ' || text.back() == '\r'))
    text.remove_suffix(1);
  return text;
}

// The text up to `mark`, and moves behind it; false where there is none.
bool ReadUntil(std::string_view* text, std::string_view mark, std::string_view* before) {
  const size_t at = text->find(mark);
  if (at == std::string_view::npos) return false;
  *before = text->substr(0, at);
  text->remove_prefix(at + mark.size());
  return true;
}

}  // namespace

ChatOutputParser::ChatOutputParser(const Options& options)
    : state_(options.begins_in_reasoning ? State::kReasoning : State::kContent) {
  for (const Json& tool : options.tools) {
    const Json& function = tool.is_object() && tool.contains("function") ? tool["function"] : tool;
    if (!function.is_object() || !function.contains("name") || !function["name"].is_string()) continue;
    std::map<std::string, bool>& parameters = is_string_[function["name"].get<std::string>()];
    if (!function.contains("parameters") || !function["parameters"].is_object()) continue;
    const Json& schema = function["parameters"];
    if (!schema.contains("properties") || !schema["properties"].is_object()) continue;
    for (const auto& [name, property] : schema["properties"].items())
      parameters[name] = property.is_object() && property.contains("type") && property["type"] == "string";
  }
}

void ChatOutputParser::Write(std::string_view text, Part& part) {
  std::string& to = state_ == State::kReasoning ? part.reasoning : part.content;
  if (is_at_beginning_) {
    const size_t first = text.find_first_not_of('\n');
    if (first == std::string_view::npos) return;
    text.remove_prefix(first);
    is_at_beginning_ = false;
  }
  const size_t last = text.find_last_not_of('\n');
  if (last == std::string_view::npos) {
    line_breaks_ += text;
    return;
  }
  to += std::exchange(line_breaks_, "");
  to += text.substr(0, last + 1);
  line_breaks_ = text.substr(last + 1);
}

ChatOutputParser::Part ChatOutputParser::Feed(std::string_view text) {
  Part part;
  unread_ += text;
  Take(part);
  return part;
}

void ChatOutputParser::Take(Part& part) {
  while (!unread_.empty()) {
    const std::string_view text = unread_;
    if (state_ == State::kCall) {
      const Found found = FindMark(text, {kCallEnd});
      call_ += text.substr(0, std::min(found.begin, text.size()));
      if (found.mark.empty()) {
        unread_.erase(0, found.begin);
        return;
      }
      unread_.erase(0, found.begin + found.mark.size());
      EndCall(part);
      continue;
    }
    const Found found = state_ == State::kReasoning ? FindMark(text, {kReasoning, kReasoningEnd})
                                                    : FindMark(text, {kReasoning, kCall});
    Write(text.substr(0, found.begin), part);
    if (found.mark.empty()) {
      unread_.erase(0, found.begin);
      return;
    }
    unread_.erase(0, found.begin + found.mark.size());
    line_breaks_.clear();
    is_at_beginning_ = true;
    if (found.mark == kReasoning) state_ = State::kReasoning;
    if (found.mark == kReasoningEnd) state_ = State::kContent;
    if (found.mark == kCall) state_ = State::kCall;
  }
}

void ChatOutputParser::EndCall(Part& part) {
  state_ = State::kContent;
  const std::string written = std::exchange(call_, "");
  Call call;
  if (ReadCall(written, &call)) {
    part.calls.push_back(std::move(call));
    return;
  }
  is_at_beginning_ = false;
  Write(std::string(kCall).append(written).append(kCallEnd), part);
}

ChatOutputParser::Part ChatOutputParser::Finish() {
  Part part;
  if (state_ == State::kCall) {
    state_ = State::kContent;
    is_at_beginning_ = false;
    Write(std::string(kCall).append(std::exchange(call_, "")), part);
  }
  Write(std::exchange(unread_, ""), part);
  (state_ == State::kReasoning ? part.reasoning : part.content) += std::exchange(line_breaks_, "");
  return part;
}

bool ChatOutputParser::ReadCall(std::string_view written, Call* call) const {
  std::string_view text = Trim(written);
  if (text.starts_with('{')) {
    const absl::StatusOr<Json> json = ParseOrderedJson(text, "call");
    if (!json.ok() || !json->is_object() || !json->contains("name") || !(*json)["name"].is_string())
      return false;
    if (json->contains("arguments") && !(*json)["arguments"].is_object()) return false;
    call->name = (*json)["name"].get<std::string>();
    call->arguments_json = json->contains("arguments") ? (*json)["arguments"].dump() : "{}";
    return true;
  }
  std::string_view name, body;
  constexpr std::string_view kFunction = "<function=";
  if (!text.starts_with(kFunction)) return false;
  text.remove_prefix(kFunction.size());
  if (!ReadUntil(&text, ">", &name) || name.empty() || !ReadUntil(&text, "</function>", &body) ||
      !Trim(text).empty())
    return false;
  call->name = std::string(name);
  const auto tool = is_string_.find(call->name);
  Json arguments = Json::object();
  constexpr std::string_view kParameter = "<parameter=";
  for (body = Trim(body); !body.empty(); body = Trim(body)) {
    if (!body.starts_with(kParameter)) return false;
    body.remove_prefix(kParameter.size());
    std::string_view key, value;
    if (!ReadUntil(&body, ">", &key) || key.empty() || !ReadUntil(&body, "</parameter>", &value))
      return false;
    // One line break belongs to the form at each end.
    if (value.starts_with('\n')) value.remove_prefix(1);
    if (value.ends_with('\n')) value.remove_suffix(1);
    bool is_string = false;
    if (tool != is_string_.end()) {
      const auto parameter = tool->second.find(std::string(key));
      is_string = parameter != tool->second.end() && parameter->second;
    }
    absl::StatusOr<Json> json = absl::UnknownError("");
    if (!is_string) json = ParseOrderedJson(value, "value");
    arguments[std::string(key)] = json.ok() ? *std::move(json) : Json(std::string(value));
  }
  call->arguments_json = arguments.dump(-1, ' ', false, Json::error_handler_t::replace);
  return true;
}

}  // namespace dflash
