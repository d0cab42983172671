#include "base/json_value.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string Repeat(const std::string& text, int count) {
  std::string all;
  for (int i = 0; i < count; ++i) all += text;
  return all;
}

TEST(JsonValueTest, ReadsEveryKind) {
  const auto parsed = ParseJson(R"({"b": [1, -2, 1.0, 1e2, "x\u00e9", true, null], "a": {}})", "f.json");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->members[0].key, "a");  // sorted
  EXPECT_EQ(parsed->Find("c"), nullptr);
  const JsonValue* list = parsed->Find("b");
  ASSERT_NE(list, nullptr);
  ASSERT_EQ(list->elements.size(), 7u);
  using Kind = JsonValue::Kind;
  EXPECT_EQ(list->elements[0].kind, Kind::kInt);
  EXPECT_EQ(list->elements[0].integer, 1);
  EXPECT_EQ(list->elements[1].integer, -2);
  EXPECT_EQ(list->elements[2].kind, Kind::kFloat);
  EXPECT_EQ(list->elements[2].number, 1.0);
  EXPECT_EQ(list->elements[3].kind, Kind::kFloat);
  EXPECT_EQ(list->elements[3].number, 100.0);
  EXPECT_EQ(list->elements[4].string, "x\u00e9");
  EXPECT_EQ(list->elements[5].kind, Kind::kBool);
  EXPECT_TRUE(list->elements[5].boolean);
  EXPECT_EQ(list->elements[6].kind, Kind::kNull);
}

TEST(JsonValueTest, KeepsTheLargestIntegersAndSmallestFloats) {
  const auto parsed = ParseJson("[9223372036854775807, -9223372036854775808, 4.9e-324, 0e-999, -0.0]", "f");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->elements[0].integer, INT64_MAX);
  EXPECT_EQ(parsed->elements[1].integer, INT64_MIN);
  EXPECT_EQ(parsed->elements[2].number, 4.9e-324);
  EXPECT_EQ(parsed->elements[3].number, 0);
}

struct BadCase {
  std::string text;
  std::string message;
};

TEST(JsonValueTest, RefusesWhatIsNotStrictJson) {
  const BadCase cases[] = {
      {"", "not valid JSON"},
      {"{", "line 1"},
      {"{\"a\": 1,}", "not valid JSON"},
      {"{\"a\" 1}", "not valid JSON"},
      {"[1 2]", "not valid JSON"},
      {"[1]x", "not valid JSON"},
      {"[1][2]", "not valid JSON"},
      {"// c\n1", "not valid JSON"},
      {"{'a': 1}", "not valid JSON"},
      {"[01]", "not valid JSON"},
      {"[+1]", "not valid JSON"},
      {"[.5]", "not valid JSON"},
      {"[1.]", "not valid JSON"},
      {"[NaN]", "not valid JSON"},
      {"[Infinity]", "not valid JSON"},
      {"[True]", "not valid JSON"},
      {"\n\n[\"\x01\"]", "line 3"},
      {"[\"\xff\"]", "not valid JSON"},
      {"[\"\xc0\xaf\"]", "not valid JSON"},      // overlong
      {"[\"\xed\xa0\x80\"]", "not valid JSON"},  // surrogate as UTF-8
      {"[\"\\ud800\"]", "not valid JSON"},       // lone surrogate
      {"[\"\\x\"]", "not valid JSON"},
      {std::string("[1]\0", 4), "not valid JSON"},
      {std::string("[1]\0{}", 6), "a zero byte at offset 3"},
      {"[1e999]", "number overflow"},
      {"{\"a\": {\"b\": -1e999}}", "a.b"},
      {"[1e-999]", "too small"},
      {"{\"a\": [0, 9223372036854775808]}", "a[1]: integer does not fit"},
      {"[-9223372036854775809]", "does not fit"},
      {"[123456789012345678901234567890]", "does not fit"},
      {"{\"a\": 1, \"a\": 1}", "a: the key appears twice"},
      {"{\"x\": {\"a\": 1, \"b\": 2, \"a\": null}}", "x.a: the key appears twice"},
      {"{\"x\": [{}, {\"a\": 1, \"\\u0061\": 2}]}", "x[1].a: the key appears twice"},
      {Repeat("[", 17) + Repeat("]", 17), "nested deeper than 16"},
      {Repeat("{\"a\":", 100000), "nested deeper than 16"},
  };
  for (const BadCase& bad : cases) {
    SCOPED_TRACE(bad.text.substr(0, 60));
    const auto parsed = ParseJson(bad.text, "dir/f.json");
    ASSERT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(parsed.status().message()), StartsWith("dir/f.json: "));
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr(bad.message));
  }
}

TEST(JsonValueTest, KeepsItsBounds) {
  EXPECT_TRUE(ParseJson("[1, 2, 3]", "f", {9, 1, 4}).ok());
  EXPECT_THAT(std::string(ParseJson("[1, 2, 3]", "f", {8, 1, 4}).status().message()), HasSubstr("at most 8"));
  EXPECT_THAT(std::string(ParseJson("[1, 2, 3]", "f", {9, 1, 3}).status().message()),
              HasSubstr("more than 3 values"));
  EXPECT_THAT(std::string(ParseJson("[[], 2]", "f", {9, 1, 9}).status().message()),
              HasSubstr("deeper than 1"));
  EXPECT_TRUE(ParseJson(Repeat("[", 16) + Repeat("]", 16), "f").ok());
}

TEST(JsonValueTest, PrintableNeitherBreaksLinesNorCharacters) {
  EXPECT_EQ(Printable("a\nb\"c"), "a\\nb\\\"c");
  const std::string cut = Printable(Repeat("\u00e9", 100));
  EXPECT_EQ(cut, Repeat("\u00e9", 48) + "...");
  EXPECT_EQ(Printable("x" + Repeat("\u00e9", 100)), "x" + Repeat("\u00e9", 47) + "...");
}

}  // namespace
}  // namespace dflash
