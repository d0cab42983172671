#include "text/ordered_json.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::StartsWith;

std::string Repeat(const std::string& text, int count) {
  std::string out;
  for (int i = 0; i < count; ++i) out += text;
  return out;
}

TEST(OrderedJsonTest, KeepsTheOrderOfKeys) {
  const auto json = ParseOrderedJson(
      R"({"z": 1, "a": [true, null, "é", 1.0, -5], "m": {"y": 1e2, "b": {}}, "z": [], "n": 0, "z": 3})", "x");
  ASSERT_TRUE(json.ok()) << json.status();
  EXPECT_EQ(json->dump(), R"({"z":3,"a":[true,null,"é",1.0,-5],"m":{"y":100.0,"b":{}},"n":0})");
  EXPECT_EQ(ParseOrderedJson("9223372036854775807", "x")->get<int64_t>(), INT64_MAX);
  EXPECT_EQ(ParseOrderedJson("-9223372036854775808", "x")->get<int64_t>(), INT64_MIN);
  EXPECT_EQ(ParseOrderedJson(" [] ", "x")->dump(), "[]");
  EXPECT_EQ(ParseOrderedJson("{\"a\": {\"b\": [[{}, 1], \"\"]}}", "x")->dump(),
            "{\"a\":{\"b\":[[{},1],\"\"]}}");
}

// A quarter of a million keys: quadratic work would not end within the time limit of the test.
TEST(OrderedJsonTest, TakesManyKeys) {
  std::string text = "{\"k\": 0";
  for (int i = 0; i < 250'000; ++i) text += ", \"" + std::to_string(i) + "\": 0";
  const auto json = ParseOrderedJson(text + ", \"k\": 1, \"last\": 2}", "x");
  ASSERT_TRUE(json.ok()) << json.status();
  EXPECT_EQ(json->size(), 250'002u);
  EXPECT_EQ(json->begin().key(), "k");
  EXPECT_EQ(json->begin().value(), 1);
  EXPECT_EQ(json->back(), 2);
}

TEST(OrderedJsonTest, RefusesWhatIsNoJsonOrOutOfBounds) {
  for (const std::string& text :
       {std::string(), std::string("{"), std::string("{\"a\": 1,}"), std::string("[1] 2"), std::string("nul"),
        std::string("\"\xff\""), std::string("\"\\ud800\""), std::string("NaN"), std::string("01"),
        std::string("1e999"), std::string("9223372036854775808"), std::string("-9223372036854775809"),
        std::string("99999999999999999999"), std::string("// c\n1")}) {
    const auto json = ParseOrderedJson(text, "origin");
    EXPECT_EQ(json.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(json.status().message()), StartsWith("origin: ")) << text;
  }
  EXPECT_TRUE(ParseOrderedJson(Repeat("[", 128) + Repeat("]", 128), "x").ok());
  EXPECT_EQ(ParseOrderedJson(Repeat("[", 129) + Repeat("]", 129), "x").status().message(),
            "x: nests deeper than 128");
  EXPECT_FALSE(ParseOrderedJson(Repeat("{\"a\":", 1'000'000), "x").ok());
  EXPECT_EQ(ParseOrderedJson("[{}, {\"a\": 1, \"b\": 2, \"a\": 3}]", "x", {.repeated_keys = false})
                .status()
                .message(),
            "x: the key \"a\" twice");
  EXPECT_TRUE(ParseOrderedJson("{\"a\": {\"a\": 1}, \"b\": {\"a\": 1}}", "x", {.repeated_keys = false}).ok());
  EXPECT_EQ(ParseOrderedJson("[1, 2]", "x", {.max_bytes = 5}).status().message(),
            "x: 6 bytes of JSON, at most 5 are allowed");
}

}  // namespace
}  // namespace dflash
