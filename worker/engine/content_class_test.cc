#include "worker/engine/content_class.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "text/tokenizer.h"

namespace dflash {
namespace {

using ::testing::Each;

// The class after every token of `output`, as the tiny model's tokenizer cuts it.
std::vector<ContentClass> Classes(const std::string& prompt, const std::string& output) {
  static const Tokenizer tokenizer =
      Tokenizer::Load(std::string(DFLASHD_SOURCE_DIR) + "/models/tiny-qwen3.6").value();
  static const ContentMarks marks(&tokenizer);
  ContentTracker tracker(&marks, tokenizer.Encode(prompt, AddedTokens::kParse).value());
  std::vector<ContentClass> classes = {tracker.current()};
  const std::vector<int32_t> tokens = tokenizer.Encode(output, AddedTokens::kParse).value();
  for (const int32_t token : tokens) {
    tracker.See(token);
    classes.push_back(tracker.current());
  }
  return classes;
}

TEST(ContentClassTest, ThePromptMayHaveBegunTheThinking) {
  EXPECT_EQ(Classes("<|im_start|>assistant\n<think>\n", "")[0], ContentClass::kThinking);
  EXPECT_EQ(Classes("<|im_start|>assistant\n<think>\n\n</think>\n\n", "")[0], ContentClass::kText);
  EXPECT_EQ(Classes("<|im_start|>assistant\n", "")[0], ContentClass::kText);
  // A user who writes the mark far before the end does not open it.
  const std::string filler = " far away and long ago there was a house by the sea with a garden behind it";
  EXPECT_EQ(Classes("what is <think> for?" + filler + "<|im_start|>assistant\n", "")[0], ContentClass::kText);
}

TEST(ContentClassTest, MarksOfTheOutputChangeTheClass) {
  EXPECT_EQ(Classes("<think>\n", "so it is</think>").back(), ContentClass::kText);
  EXPECT_EQ(Classes("", "<tool_call>\n{\"name\"").back(), ContentClass::kToolCall);
  EXPECT_EQ(Classes("", "<tool_call>x</tool_call>").back(), ContentClass::kText);
  EXPECT_EQ(Classes("", "<think>let me call <tool_call>x").back(), ContentClass::kToolCall);
  EXPECT_THAT(Classes("", "no marks at all"), Each(ContentClass::kText));
}

TEST(ContentClassTest, FencesHoldCode) {
  EXPECT_EQ(Classes("", "see\n```\ndef f():\n```\nend").back(), ContentClass::kText);
  EXPECT_EQ(Classes("", "see\n```\ndef f():").back(), ContentClass::kCode);
  EXPECT_EQ(Classes("<think>\n", "```\ndef f():").back(), ContentClass::kThinking);
  EXPECT_EQ(Classes("<think>\n", "```\ndef f():</think>").back(), ContentClass::kText)
      << "the fence ends, too";
}

TEST(ContentClassTest, WithoutTokenizerAllIsText) {
  const ContentMarks marks(nullptr);
  ContentTracker tracker(&marks, {1, 2, 3});
  tracker.See(7);
  EXPECT_EQ(tracker.current(), ContentClass::kText);
}

}  // namespace
}  // namespace dflash
