#include "text/chat_output.h"

#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace dflash {
namespace {

struct Case {
  const char* name;
  bool begins_in_reasoning;
  std::string text;
  std::string reasoning, content;
  std::vector<std::pair<std::string, std::string>> calls;
};

const std::vector<Case>& Cases() {
  static const auto* const cases = new std::vector<Case>{
      {"plain", false, "Hello\n\nworld\n", "", "Hello\n\nworld\n", {}},
      {"empty", true, "", "", "", {}},
      {"reasoning", true, "\nLet me\n\nsee.\n</think>\n\nFour.", "Let me\n\nsee.", "Four.", {}},
      {"reasoning without end", true, "Let me\n", "Let me\n", "", {}},
      {"no reasoning", true, "\n\n</think>\n\nFour.", "", "Four.", {}},
      {"opened in the output", false, "<think>\na\n</think>\n\nb", "a", "b", {}},
      {"nearly marks",
       true,
       "a < b <think </thin> <tool_call>x</think>1 </think> <tool_cal> <<tool_call",
       "a < b <think </thin> <tool_call>x",
       "1 </think> <tool_cal> <<tool_call",
       {}},
      {"call as JSON",
       false,
       "I look.\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"b\": 1, \"a\": [\"<\"]}}\n</tool_call>",
       "",
       "I look.",
       {{"f", R"({"b":1,"a":["<"]})"}}},
      {"two calls",
       false,
       "<tool_call>\n{\"name\": \"f\", \"arguments\": "
       "{}}\n</tool_call>\n<tool_call>{\"name\":\"g\"}</tool_call>\n",
       "",
       "",
       {{"f", "{}"}, {"g", "{}"}}},
      {"call in blocks",
       true,
       "hm</think>\n\n<tool_call>\n<function=find>\n<parameter=query>\n42\n</"
       "parameter>\n<parameter=limit>\n7\n"
       "</parameter>\n<parameter=deep>\n{\"x\": "
       "[1]}\n</parameter>\n<parameter=text>\n\ntwo\nlines\n\n</parameter>\n"
       "</function>\n</tool_call>",
       "hm",
       "",
       {{"find", R"({"query":"42","limit":7,"deep":{"x":[1]},"text":"\ntwo\nlines\n"})"}}},
      {"unreadable calls",
       false,
       "a\n<tool_call>{\"name\": 1}</tool_call>\nb<tool_call><function=></tool_call>",
       "",
       "a<tool_call>{\"name\": 1}</tool_call>\nb<tool_call><function=></tool_call>",
       {}},
      {"call without end", false, "x<tool_call>{\"name\": \"f\"", "", "x<tool_call>{\"name\": \"f\"", {}},
      {"characters",
       true,
       "\xc3\xbc\n</think>\n\xe2\x82\xac<tool_call>{\"name\":\"\xc3\xa4\",\"arguments\":{}}</tool_call>",
       "\xc3\xbc",
       "\xe2\x82\xac",
       {{"\xc3\xa4", "{}"}}},
  };
  return *cases;
}

ChatOutputParser MakeParser(const Case& c) {
  return ChatOutputParser(
      {.begins_in_reasoning = c.begins_in_reasoning,
       .tools = {nlohmann::ordered_json::parse(
           R"({"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {
               "query": {"type": "string"}, "limit": {"type": "integer"}, "text": {"type": "string"}}}}})")}});
}

ChatOutputParser::Part Whole(const Case& c, const std::vector<std::string>& pieces) {
  ChatOutputParser parser = MakeParser(c);
  ChatOutputParser::Part whole;
  const auto add = [&](const ChatOutputParser::Part& part) {
    whole.reasoning += part.reasoning;
    whole.content += part.content;
    whole.calls.insert(whole.calls.end(), part.calls.begin(), part.calls.end());
  };
  for (const std::string& piece : pieces) add(parser.Feed(piece));
  add(parser.Finish());
  return whole;
}

void ExpectRight(const Case& c, const ChatOutputParser::Part& part) {
  ASSERT_EQ(part.reasoning, c.reasoning);
  ASSERT_EQ(part.content, c.content);
  ASSERT_EQ(part.calls.size(), c.calls.size());
  for (size_t i = 0; i < c.calls.size(); ++i) {
    ASSERT_EQ(part.calls[i].name, c.calls[i].first);
    ASSERT_EQ(part.calls[i].arguments_json, c.calls[i].second);
  }
}

// However the text is cut: whole, byte by byte, at any one or two places, at random ones.
TEST(ChatOutputParser, CutsChangeNothing) {
  std::mt19937 random(1);
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.name);
    ExpectRight(c, Whole(c, {c.text}));
    std::vector<std::string> bytes;
    for (const char byte : c.text) bytes.emplace_back(1, byte);
    ExpectRight(c, Whole(c, bytes));
    for (size_t i = 0; i <= c.text.size(); ++i) {
      for (size_t k = i; k <= c.text.size(); ++k)
        ExpectRight(c, Whole(c, {c.text.substr(0, i), c.text.substr(i, k - i), c.text.substr(k)}));
    }
    for (int trial = 0; trial < 200; ++trial) {
      std::vector<std::string> pieces;
      for (size_t at = 0; at < c.text.size();) {
        const size_t size = 1 + random() % 7;
        pieces.push_back(c.text.substr(at, size));
        at += size;
      }
      ExpectRight(c, Whole(c, pieces));
    }
  }
}

// Plain text is not held back but for line breaks and what may become a mark.
TEST(ChatOutputParser, ReturnsWhatIsCertain) {
  ChatOutputParser parser({});
  EXPECT_EQ(parser.Feed("Hello\n").content, "Hello");
  EXPECT_EQ(parser.Feed("you <b").content, "\nyou <b");
  EXPECT_EQ(parser.Feed(" <tool").content, " ");
  EXPECT_EQ(parser.Feed("box>").content, "<toolbox>");
}

}  // namespace
}  // namespace dflash
