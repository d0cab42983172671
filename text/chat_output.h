// What a chat model writes, taken apart as it comes: reasoning, content, tool calls. The marks are those of
// Qwen's templates: reasoning ends with </think>; a call stands between <tool_call> and </tool_call>, as one
// JSON object with name and arguments, or as <function=NAME> with <parameter=NAME> blocks.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "nlohmann/json.hpp"

namespace dflash {

// The parser of one output. What Feed and Finish return, put together, does not depend on how the text is
// cut. Not thread-safe.
class ChatOutputParser {
 public:
  struct Options {
    bool begins_in_reasoning = false;  // the prompt has opened it
    // Tools on offer, as chat templates get them: says which parameters are strings.
    std::vector<nlohmann::ordered_json> tools;
  };
  explicit ChatOutputParser(const Options& options);

  struct Call {
    std::string name;
    std::string arguments_json;  // one object
  };
  struct Part {
    std::string reasoning;  // without the line breaks at its ends
    std::string content;    // without those at its beginning and around calls
    std::vector<Call> calls;
    bool empty() const { return reasoning.empty() && content.empty() && calls.empty(); }
  };

  // Takes the next text and returns what it makes certain. A possible beginning of a mark, and line breaks in
  // front of one, are held back.
  Part Feed(std::string_view text);
  // The output ends: returns what was held back. A call without its end, or that cannot be read, is content
  // as it was written.
  Part Finish();

 private:
  enum class State { kReasoning, kContent, kCall };

  void Take(Part& part);
  // Adds text that is no mark, but for line breaks at its end, of which nobody knows yet what follows.
  void Write(std::string_view text, Part& part);
  void EndCall(Part& part);
  bool ReadCall(std::string_view written, Call* call) const;

  State state_;
  std::map<std::string, std::map<std::string, bool>> is_string_;  // by tool and parameter
  std::string unread_;                                            // may begin with a part of a mark
  std::string line_breaks_;                                       // written, not returned yet
  bool is_at_beginning_ = true;  // of reasoning or content: line breaks are dropped
  std::string call_;             // inside the marks, so far
};

}  // namespace dflash
