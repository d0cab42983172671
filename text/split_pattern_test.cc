#include "text/split_pattern.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using testing::ElementsAre;

// The pattern of Qwen3.5 and later.
constexpr char kQwen[] =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

std::vector<std::string> Split(std::string_view pattern, std::string_view text) {
  const auto compiled = SplitPattern::Compile(pattern);
  EXPECT_TRUE(compiled.ok()) << compiled.status();
  std::vector<std::string> pieces;
  const absl::Status status =
      compiled->Split(text, [&](std::string_view piece) { pieces.emplace_back(piece); });
  EXPECT_TRUE(status.ok()) << status;
  return pieces;
}

TEST(SplitPatternTest, WordsDigitsSpacesAndSigns) {
  EXPECT_THAT(Split(kQwen, ""), ElementsAre());
  EXPECT_THAT(Split(kQwen, "Hello world"), ElementsAre("Hello", " world"));
  EXPECT_THAT(Split(kQwen, "it's IT'S"), ElementsAre("it", "'s", " IT", "'S"));
  EXPECT_THAT(Split(kQwen, "'\u017F"), ElementsAre("'\u017F"));  // long s is an s without its case
  EXPECT_THAT(Split(kQwen, "x=1234;"), ElementsAre("x", "=", "1", "2", "3", "4", ";"));
  EXPECT_THAT(Split(kQwen, "a   b"), ElementsAre("a", "  ", " b"));
  EXPECT_THAT(Split(kQwen, "a \n\n  b  "), ElementsAre("a", " \n\n", " ", " b", "  "));
  EXPECT_THAT(Split(kQwen, "f(x);\n}"), ElementsAre("f", "(x", ");\n", "}"));
  EXPECT_THAT(Split(kQwen, "e\u0301x \u0301y"), ElementsAre("e\u0301x", " \u0301y"));
}

TEST(SplitPatternTest, WhatLiesBetweenMatchesIsAPieceToo) {
  EXPECT_THAT(Split("[0-9]+", "ab12c3"), ElementsAre("ab", "12", "c", "3"));
  EXPECT_THAT(Split("(a)(b)?", "xabya"), ElementsAre("x", "ab", "y", "a"));
}

// Unicode's White_Space, in and outside of classes. U+180E and U+200B are none.
TEST(SplitPatternTest, WhiteSpaceIsUnicodes) {
  const std::string spaces =
      "\t\n\v\f\r "
      "\u0085\u00A0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200A\u2028\u2029"
      "\u202F\u205F\u3000";
  EXPECT_THAT(Split(R"(\s+)", "a" + spaces + "b"), ElementsAre("a", spaces, "b"));
  EXPECT_THAT(Split(R"([^\s]+)", "a" + spaces + "b"), ElementsAre("a", spaces, "b"));
  for (const std::string other : {"\u180E", "\u200B", "\uFEFF", "\x1C", "x"}) {
    const std::string between = " " + other + " ", around = "x" + other + "x";
    EXPECT_THAT(Split(R"(\s+)", between), ElementsAre(" ", other, " "));
    EXPECT_THAT(Split(R"([^\S]+)", between), ElementsAre(" ", other, " "));
    EXPECT_THAT(Split(R"(\S+)", around), ElementsAre(around));
    EXPECT_THAT(Split(R"([^\s]+)", around), ElementsAre(around));
  }
  EXPECT_THAT(Split(R"(\\s)", R"(a\s b)"), ElementsAre("a", R"(\s)", " b"));  // an escaped backslash
}

TEST(SplitPatternTest, BadPatternsAreErrors) {
  for (const char* pattern : {"(", "[a", "a{2,1}", "\\", "(?<n", "x*", "", "a|", "\xFF"}) {
    EXPECT_EQ(SplitPattern::Compile(pattern).status().code(), absl::StatusCode::kInvalidArgument) << pattern;
  }
}

TEST(SplitPatternTest, ErrorsQuoteTheBeginningOfWhatIsWrong) {
  std::string pattern = "a{2,1}";
  for (int i = 0; i < 200; ++i) pattern += "\xc3\xa9";
  const std::string message(SplitPattern::Compile(pattern).status().message());
  EXPECT_LT(message.size(), 200u);
  EXPECT_THAT(message, ::testing::EndsWith("\xc3\xa9...\"")) << "whole characters";
}

TEST(SplitPatternTest, BacktrackingIsBounded) {
  const auto pattern = SplitPattern::Compile("(a|a)+b|(?:a+)+c");
  ASSERT_TRUE(pattern.ok()) << pattern.status();
  const absl::Status status = pattern->Split(std::string(64, 'a'), [](std::string_view) {});
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
}

// Their meaning is not the same in every expression library.
TEST(SplitPatternTest, OtherEscapesOfLettersAreErrors) {
  for (const char* pattern :
       {R"(\w+)", R"([\d])", R"(\ba)", R"(\h)", R"(a(?=b\K))", R"(\C)", R"(\Qa\E)", R"(\x41)", R"(\1)"}) {
    EXPECT_EQ(SplitPattern::Compile(pattern).status().code(), absl::StatusCode::kUnimplemented) << pattern;
  }
  EXPECT_THAT(Split(R"(\.+|\t|\\w)", R"(a..w\w)"), ElementsAre("a", "..", "w", R"(\w)"));
}

}  // namespace
}  // namespace dflash
