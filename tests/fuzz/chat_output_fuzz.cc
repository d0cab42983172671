// Outputs of chat models, taken apart: whatever they are and however they are cut, the parts are the same.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/check.h"
#include "text/chat_output.h"

namespace dflash {
namespace {

struct Whole {
  std::string reasoning, content, calls;
  void Add(const ChatOutputParser::Part& part) {
    reasoning += part.reasoning;
    content += part.content;
    for (const ChatOutputParser::Call& call : part.calls) {
      DFLASH_CHECK(nlohmann::json::parse(call.arguments_json, nullptr, false).is_object(),
                   call.arguments_json.c_str());
      calls += call.name + call.arguments_json;
    }
  }
};

// Pieces of `size` bytes.
Whole TakeApart(std::string_view text, bool begins_in_reasoning, size_t size) {
  ChatOutputParser parser({.begins_in_reasoning = begins_in_reasoning, .tools = {}});
  Whole whole;
  for (size_t at = 0; at < text.size(); at += size) whole.Add(parser.Feed(text.substr(at, size)));
  whole.Add(parser.Finish());
  return whole;
}

void Run(std::string_view text) {
  for (const bool begins_in_reasoning : {false, true}) {
    const Whole whole = TakeApart(text, begins_in_reasoning, text.size() + 1);
    for (const size_t size : {1u, 2u, 3u, 7u}) {
      const Whole cut = TakeApart(text, begins_in_reasoning, size);
      DFLASH_CHECK(cut.reasoning == whole.reasoning && cut.content == whole.content &&
                   cut.calls == whole.calls);
    }
  }
}

}  // namespace
}  // namespace dflash

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  dflash::Run(std::string_view(reinterpret_cast<const char*>(data), size));
  return 0;
}
