#include "text/added_tokens.h"

#include <random>

#include "gtest/gtest.h"

namespace dflash {
namespace {

std::string Show(const std::optional<AddedTokenMatcher::Match>& match) {
  if (!match) return "none";
  return std::to_string(match->begin) + "+" + std::to_string(match->length) + "=" + std::to_string(match->id);
}

TEST(AddedTokenMatcherTest, LeftmostThenLongest) {
  const AddedTokenMatcher matcher(
      {{1, "<a>", true}, {2, "<a><b>", true}, {3, "a>", false}, {4, "\u00e9", false}});
  EXPECT_EQ(Show(matcher.Find("", 0)), "none");
  EXPECT_EQ(Show(matcher.Find("x<a", 0)), "none");
  EXPECT_EQ(Show(matcher.Find("x<a>", 0)), "1+3=1");
  EXPECT_EQ(Show(matcher.Find("x<a><b>", 0)), "1+6=2");
  EXPECT_EQ(Show(matcher.Find("x<a><b", 0)), "1+3=1");
  EXPECT_EQ(Show(matcher.Find("x<a>", 2)), "2+2=3");
  EXPECT_EQ(Show(matcher.Find("x<a>", 4)), "none");
  EXPECT_EQ(Show(matcher.Find("e\u00e9", 0)), "1+2=4");
  EXPECT_EQ(Show(AddedTokenMatcher({}).Find("<a>", 0)), "none");
}

TEST(AddedTokenMatcherTest, EqualsComparingEverywhere) {
  std::mt19937 random(5);
  const auto word = [&](size_t most) {
    std::string text;
    for (size_t n = random() % most + 1; n > 0; --n) text.push_back("ab<"[random() % 3]);
    return text;
  };
  for (int round = 0; round < 2000; ++round) {
    std::vector<AddedToken> tokens;
    for (int32_t id = 0; id < 5; ++id) {
      const std::string content = word(4);
      bool known = false;
      for (const AddedToken& token : tokens) known |= token.content == content;
      if (!known) tokens.push_back({id, content, false});
    }
    const std::string text = word(20);
    std::optional<AddedTokenMatcher::Match> expected;
    for (size_t begin = 0; begin < text.size() && !expected; ++begin) {
      for (const AddedToken& token : tokens) {
        if (text.compare(begin, token.content.size(), token.content) != 0) continue;
        if (!expected || token.content.size() > expected->length)
          expected = {begin, token.content.size(), token.id};
      }
    }
    EXPECT_EQ(Show(AddedTokenMatcher(tokens).Find(text, 0)), Show(expected)) << text;
  }
}

}  // namespace
}  // namespace dflash
