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
  const auto json =
      ParseOrderedJson(R"({"z": 1, "a": [true, null, "é", 1.0, -5], "m": {"y": 1e2, "b": 2}, "z": 3})", "x");
  ASSERT_TRUE(json.ok()) << json.status();
  EXPECT_EQ(json->dump(), R"({"z":3,"a":[true,null,"é",1.0,-5],"m":{"y":100.0,"b":2}})");
  EXPECT_EQ(ParseOrderedJson("9223372036854775807", "x")->get<int64_t>(), INT64_MAX);
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
  std::string keys = "{\"0\": 0";
  for (int i = 1; i < 1024; ++i) keys += ", \"" + std::to_string(i) + "\": 0";
  EXPECT_EQ(ParseOrderedJson(keys + "}", "x")->size(), 1024u);
  EXPECT_EQ(ParseOrderedJson(keys + ", \"x\": 0}", "x").status().message(),
            "x: an object of more than 1024 keys");
  EXPECT_EQ(ParseOrderedJson("[1, 2]", "x", {.max_bytes = 5}).status().message(),
            "x: 6 bytes of JSON, at most 5 are allowed");
}

}  // namespace
}  // namespace dflash
