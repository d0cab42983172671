// Chat templates with any conversation, within their limits.
// Input: a template, then (after a zero byte) messages as JSON, then (after another) tools as JSON. A missing
// part is that of a short conversation.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/check.h"
#include "text/chat_template.h"
#include "text/utf8.h"

namespace dflash {
namespace {

using Json = nlohmann::ordered_json;

std::string_view TakePart(std::string_view& rest) {
  const size_t end = rest.find('\0');
  const std::string_view part = rest.substr(0, end);
  rest = end == std::string_view::npos ? std::string_view() : rest.substr(end + 1);
  return part;
}

Json JsonOr(std::string_view text, const Json& otherwise) {
  Json json = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  return json.is_discarded() ? otherwise : json;
}

void CheckError(const absl::Status& status) {
  const bool expected = status.ok() || status.code() == absl::StatusCode::kInvalidArgument ||
                        status.code() == absl::StatusCode::kUnimplemented ||
                        status.code() == absl::StatusCode::kResourceExhausted;
  DFLASH_CHECK(expected, status.ToString().c_str());
  DFLASH_CHECK(status.ok() || !status.message().empty());
}

void Run(std::string_view input) {
  static const Json messages = Json::parse(
      R"([{"role":"system","content":"s"},{"role":"user","content":"u <|im_end|>"},
          {"role":"assistant","content":"a","reasoning_content":"r","tool_calls":[{"type":"function",
           "function":{"name":"f","arguments":{"x":[1,2.5,true,null,"y"]}}}]},{"role":"tool","content":"t"}])");
  static const Json tools = Json::parse(R"([{"type":"function","function":{"name":"f","parameters":{}}}])");
  const std::string_view source = TakePart(input);
  const Json chat = JsonOr(TakePart(input), messages), offered = JsonOr(TakePart(input), tools);
  // What a template nests, and so the stack, is bounded as in production; time and memory more tightly, since
  // there are many inputs.
  jinja::Limits limits;
  limits.max_steps = 100'000;
  limits.max_output_bytes = 1 << 16;
  const auto parsed =
      ChatTemplate::Parse(source, {{"eos_token", "<|im_end|>"}, {"bos_token", nullptr}}, limits);
  CheckError(parsed.status());
  if (!parsed.ok()) return;
  ChatOptions options;
  options.enable_thinking = false;
  options.variables = {{"preserve_thinking", true}};
  options.now = absl::UnixEpoch();
  options.time_zone = absl::UTCTimeZone();
  const auto rendered = parsed->Render(chat, offered, options);
  CheckError(rendered.status());
  if (!rendered.ok()) return;
  DFLASH_CHECK(rendered->text.size() <= limits.max_output_bytes);
  size_t end = 0;
  for (const jinja::ByteRange& range : rendered->content) {
    DFLASH_CHECK(range.begin >= end && range.begin < range.end && range.end <= rendered->text.size());
    end = range.end;
  }
  size_t bytes = 0;
  for (const TextSegment& segment : rendered->Segments()) bytes += segment.text.size();
  DFLASH_CHECK(bytes == rendered->text.size());
  // The same again gives the same.
  const auto again = parsed->Render(chat, offered, options);
  DFLASH_CHECK(again.ok() && again->text == rendered->text);
}

}  // namespace
}  // namespace dflash

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  dflash::Run(std::string_view(reinterpret_cast<const char*>(data), size));
  return 0;
}
