#include "text/stop_matcher.h"

#include <algorithm>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

StopMatcher Matcher(std::vector<std::string> strings) {
  auto matcher = StopMatcher::Create(std::move(strings));
  EXPECT_TRUE(matcher.ok()) << matcher.status();
  return *std::move(matcher);
}

TEST(StopMatcherTest, HoldsBackWhatMayBecomeAStopString) {
  StopMatcher matcher = Matcher({"END", "\n\n"});
  EXPECT_EQ(matcher.Feed("some E").text, "some ");
  EXPECT_EQ(matcher.Feed("N").text, "");
  EXPECT_EQ(matcher.Feed("EN").text, "EN");
  const StopMatcher::Result result = matcher.Feed("D more");
  EXPECT_EQ(result.text, "");
  ASSERT_TRUE(result.match);
  EXPECT_EQ(result.match->string, 0u);
  EXPECT_EQ(result.match->begin, 7u);
  EXPECT_EQ(result.match->consumed, 1u);
  EXPECT_EQ(matcher.Feed("END").text, "");
  EXPECT_FALSE(matcher.Feed("END").match);
  EXPECT_EQ(matcher.Finish(), "");
}

TEST(StopMatcherTest, FinishReturnsWhatWasHeldBack) {
  StopMatcher matcher = Matcher({"abc"});
  EXPECT_EQ(matcher.Feed("xxab").text, "xx");
  EXPECT_EQ(matcher.Finish(), "ab");
}

TEST(StopMatcherTest, WithoutStringsEverythingPasses) {
  StopMatcher matcher = Matcher({});
  EXPECT_EQ(matcher.Feed("abc").text, "abc");
  EXPECT_FALSE(matcher.Feed("").match);
  EXPECT_EQ(matcher.Finish(), "");
}

TEST(StopMatcherTest, FirstToBeCompleteThenLongest) {
  const auto match = [](std::vector<std::string> strings, std::string_view text) {
    StopMatcher matcher = Matcher(std::move(strings));
    const StopMatcher::Result result = matcher.Feed(text);
    return result.text + (result.match ? "|" + std::to_string(result.match->string) : "");
  };
  EXPECT_EQ(match({"abcde", "bcd"}, "abcde"), "a|1");  // begins later but is complete first
  EXPECT_EQ(match({"abc", "bc", "zabc"}, "xabc"), "x|0");
  EXPECT_EQ(match({"bc", "abc"}, "xabc"), "x|1");
  EXPECT_EQ(match({"b", "a"}, "xab"), "x|1");
  EXPECT_EQ(match({"aab"}, "aaaab"), "aa|0");
  EXPECT_EQ(match({"x", "x"}, "x"), "|0");
}

TEST(StopMatcherTest, BadStringsAreErrors) {
  const auto message = [](std::vector<std::string> strings) {
    const absl::Status status = StopMatcher::Create(std::move(strings)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(message({"a", ""}), testing::HasSubstr("[1]: empty"));
  EXPECT_THAT(message({"a", "b", std::string(257, 'x')}), testing::HasSubstr("[2]: longer"));
  EXPECT_THAT(message({"\xC3"}), testing::HasSubstr("[0]: not UTF-8"));
  EXPECT_THAT(message(std::vector<std::string>(17, "a")), testing::HasSubstr("17"));
  EXPECT_TRUE(StopMatcher::Create(std::vector<std::string>(16, std::string(256, 'x'))).ok());
}

// Where the text stops, by looking at every prefix of it: {end, string}.
std::optional<std::pair<size_t, size_t>> StopByDefinition(const std::vector<std::string>& strings,
                                                          const std::string& text) {
  for (size_t end = 1; end <= text.size(); ++end) {
    std::optional<std::pair<size_t, size_t>> longest;
    for (size_t i = 0; i < strings.size(); ++i) {
      if (!text.substr(0, end).ends_with(strings[i])) continue;
      if (!longest || strings[i].size() > strings[longest->second].size()) longest = {end, i};
    }
    if (longest) return longest;
  }
  return std::nullopt;
}

TEST(StopMatcherTest, AnyChunksGiveTheSame) {
  std::mt19937 random(13);
  size_t stopped = 0;
  for (int round = 0; round < 20000; ++round) {
    const auto word = [&](size_t most) {
      static constexpr const char* kUnits[] = {"a", "b", "\u00E9"};
      std::string text;
      for (size_t n = random() % most + 1; n > 0; --n) text += kUnits[random() % 3];
      return text;
    };
    std::vector<std::string> strings;
    for (size_t n = random() % 4; n > 0; --n) strings.push_back(word(6));
    const std::string text = word(40);
    const auto expected = StopByDefinition(strings, text);
    stopped += expected.has_value();

    StopMatcher matcher = Matcher(strings);
    std::string sent;
    bool matched = false;
    for (size_t pos = 0; pos < text.size();) {
      const size_t size = std::min<size_t>(random() % 7, text.size() - pos);
      const StopMatcher::Result result = matcher.Feed(text.substr(pos, size));
      sent += result.text;
      if (result.match) {
        ASSERT_TRUE(expected);
        EXPECT_EQ(pos + result.match->consumed, expected->first);
        EXPECT_EQ(result.match->string, expected->second);
        EXPECT_EQ(result.match->begin, expected->first - strings[expected->second].size());
        matched = true;
        break;
      }
      pos += size;
      // Neither too little (part of a stop string gets out) nor too much is held back.
      size_t hold = 0;
      for (const std::string& string : strings) {
        for (size_t length = 1; length < string.size(); ++length) {
          if (text.substr(0, pos).ends_with(string.substr(0, length))) hold = std::max(hold, length);
        }
      }
      EXPECT_EQ(sent, text.substr(0, pos - hold));
    }
    EXPECT_EQ(matched, expected.has_value());
    sent += matcher.Finish();
    EXPECT_EQ(sent, expected ? text.substr(0, expected->first - strings[expected->second].size()) : text);
  }
  EXPECT_GT(stopped, 5000u);
}

}  // namespace
}  // namespace dflash
