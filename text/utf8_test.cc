#include "text/utf8.h"

#include <random>

#include "gtest/gtest.h"

namespace dflash {
namespace {

TEST(Utf8Test, WellFormedTextStays) {
  for (const std::string& text : {std::string(), std::string("a\0b", 3), std::string("é€😀"),
                                  std::string("\xED\x9F\xBF\xEE\x80\x80"), std::string("\xF4\x8F\xBF\xBF")}) {
    EXPECT_EQ(ReplaceIllFormed(text), text);
  }
}

// Each pair is the Unicode Standard's, section 3.9, or follows from its table 3-7.
TEST(Utf8Test, EachMaximalIllFormedPartBecomesOneReplacement) {
  const std::pair<std::string, std::string> cases[] = {
      {"\x80", "\uFFFD"},
      {"a\xFFz", "a\uFFFDz"},
      {"\xC0\xAF", "\uFFFD\uFFFD"},                      // overlong
      {"\xE0\x80\xBF", "\uFFFD\uFFFD\uFFFD"},            // overlong
      {"\xED\xA0\x80", "\uFFFD\uFFFD\uFFFD"},            // surrogate
      {"\xF4\x90\x80\x80", "\uFFFD\uFFFD\uFFFD\uFFFD"},  // above U+10FFFF
      {"\xF5\x80", "\uFFFD\uFFFD"},                      //
      {"\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41", "\uFFFD\uFFFD\uFFFD\uFFFD\x41"},
      {"\xE2\x82", "\uFFFD"},  // ends too soon
      {"\xF0\x9F\x98", "\uFFFD"},
      {"\xC3(", "\uFFFD("},
  };
  for (const auto& [bytes, expected] : cases) EXPECT_EQ(ReplaceIllFormed(bytes), expected);
}

TEST(Utf8Test, LeavesWhatTheNextBytesMayComplete) {
  const std::pair<std::string, size_t> cases[] = {
      {"a", 0},     {"a\xC3", 1},     {"a\xE2\x82", 2}, {"a\xF0\x9F\x98", 3},
      {"a\xF0", 1}, {"a\xED\xA0", 0},  // no character begins like this
      {"a\x80", 0}, {"a\xE0\x9F", 0}, {"\xF4\x8F", 2},
  };
  for (const auto& [bytes, left] : cases) {
    std::string out;
    EXPECT_EQ(AppendWellFormed(bytes, out), left) << bytes;
  }
  std::string out;
  AppendWellFormed("a\xED\xA0", out);
  EXPECT_EQ(out, "a\uFFFD\uFFFD");
}

TEST(Utf8Test, AnyCutGivesTheSameText) {
  std::mt19937 random(7);
  const std::string alphabet = "a\x80\xBF\xC3\xA9\xE2\x82\xAC\xED\xA0\xF0\x9F\x98\xF4\x90\xFF";
  for (int round = 0; round < 5000; ++round) {
    std::string bytes;
    for (size_t n = random() % 12; n > 0; --n) bytes.push_back(alphabet[random() % alphabet.size()]);
    std::string out, left;
    for (size_t pos = 0; pos < bytes.size();) {
      const size_t size = std::min<size_t>(random() % 4, bytes.size() - pos);
      left += bytes.substr(pos, size);
      pos += size;
      left = left.substr(left.size() - AppendWellFormed(left, out));
      ASSERT_LE(left.size(), 3u);
    }
    EXPECT_EQ(out + ReplaceIllFormed(left), ReplaceIllFormed(bytes));
  }
}

}  // namespace
}  // namespace dflash
