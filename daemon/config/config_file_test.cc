#include "daemon/config/config_file.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::HasSubstr;

// "key=value@place ..." of what a text says, or its error.
std::string Read(const std::string& text) {
  const auto entries = ParseConfig(text, "f");
  if (!entries.ok()) return std::string(entries.status().message());
  std::string result;
  for (const ConfigEntry& entry : *entries) result += entry.key + "=" + entry.value + "@" + entry.place + " ";
  return result;
}

TEST(ConfigFile, Yaml) {
  EXPECT_EQ(Read(""), "");
  EXPECT_EQ(Read("# nothing\n\n"), "");
  EXPECT_EQ(Read("---\nmodel: /models/a b   # here\ntp: 8\n\nlisten: \"[::]:8500\"\noff: off\nratio: 0.5\n"),
            "model=/models/a b@f:2 tp=8@f:3 listen=[::]:8500@f:5 off=off@f:6 ratio=0.5@f:7 ");
  EXPECT_EQ(Read("a: 'it''s'\nb: \"x\\ty\"\nc: ''\n"), "a=it's@f:1 b=x\ty@f:2 c=@f:3 ");
}

TEST(ConfigFile, Json) {
  EXPECT_EQ(Read("{}"), "");
  EXPECT_EQ(Read("\n {\"tp\": 8, \"model\": \"/a\\u00e9\", \"ratio\": 0.1, \"share-device\": true}"),
            "model=/a\xc3\xa9@f ratio=0.1@f share-device=true@f tp=8@f ");
}

TEST(ConfigFile, NamesWhatIsWrong) {
  const struct {
    std::string text, expected;
  } cases[] = {
      {"a: 1\na: 2\n", "f:2: a is there twice"},
      {"a: 1\nb: [1, 2]\n", "f:2: b: must be a string"},
      {"b: {c: 1}\n", "f:1: b: must be a string"},
      {"b:\n  c: 1\n", "b: must be a string"},
      {"a: 1\nb:\n", "f:2: b: must be a string, a number or true or false, and is empty"},
      {"a: ~\n", "and is empty"},
      {"a: !!binary aGk=\n", "f:1: a: must be a string"},
      {"- a\n- b\n", "f"},
      {"just text\n", "f"},
      {"\t,[", "f: must be one mapping"},
      {",[", "f: must be one mapping"},
      {",\n", "f: must be one mapping"},
      {"a: 1\n...\n", "has several documents"},
      {"a: 1\n---\nb: 2\n", "has several documents"},
      {"a: 1\n  b: 2\n", "f:2"},
      {"a: \"open\n", "a quote that is not closed"},
      {"a: 'open\nb: 1\n", "a quote that is not closed"},
      {"a: 1\nend-of-the-file: 2\n", "is there twice"},
      {"a: *nowhere\n", "f:1"},
      {"[1]: 2\n", "f:1: a key must be a name"},
      {"a: \xff\n", "f: is not valid UTF-8"},
      {"b: 1\na: \"\\N\"\n", "f:2: a is not valid UTF-8"},
      {"a: 1\n\x04\nb: 2\n", "f:2: has a control character"},
      {std::string("a: 1\n\0b: 2\n", 11), "f:2: has a control character"},
      {"{\"a\": 1, \"a\": 2}", "f"},
      {"{\"a\": null}", "a: must be a string"},
      {"{\"a\": [1]}", "a: must be a string"},
      {"{\"a\": 1", "f"},
      {"{a: 1}", "f"},  // begins like JSON, so it has to be
      {std::string(300 << 10, '#'), "over 262144"},
  };
  for (const auto& c : cases) {
    EXPECT_FALSE(ParseConfig(c.text, "f").ok()) << c.text.substr(0, 100);
    EXPECT_THAT(Read(c.text), HasSubstr(c.expected)) << c.text.substr(0, 100);
  }
}

TEST(ConfigFile, DeepNestingIsAnErrorAndNoCrash) {
  for (const char* open : {"[", "{a: ", "- ", "? "}) {
    std::string text;
    for (int i = 0; i < 50'000 && text.size() < 200'000; ++i) text += open;
    EXPECT_FALSE(ParseConfig("k: " + text, "f").ok());
    EXPECT_FALSE(ParseConfig(text, "f").ok());
  }
}

}  // namespace
}  // namespace dflash
