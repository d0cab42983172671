#include "base/json_object.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

JsonObject Read(const std::string& text) {
  absl::StatusOr<JsonObject> object = JsonObject::Parse(text, "m/config.json");
  EXPECT_TRUE(object.ok()) << object.status();
  return *std::move(object);
}

template <typename Result>
std::string Message(const Result& result) {
  const absl::Status status = [&] {
    if constexpr (std::is_same_v<Result, absl::Status>) {
      return result;
    } else {
      return result.status();
    }
  }();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  return std::string(status.message());
}

TEST(JsonObjectTest, GettersAreStrictAboutTypes) {
  const JsonObject json = Read(R"({"i": 3, "f": 3.0, "big": 9007199254740993, "b": true, "s": "x", "n": null,
                                   "il": [1, 2], "sl": ["a"], "mixed": [1, "a"], "o": {"k": 1}})");
  EXPECT_EQ(*json.Require<int64_t>("i"), 3);
  EXPECT_EQ(*json.Require<double>("i"), 3.0);
  EXPECT_EQ(*json.Require<double>("f"), 3.0);
  EXPECT_EQ(*json.Require<bool>("b"), true);
  EXPECT_EQ(*json.Require<std::string>("s"), "x");
  EXPECT_THAT(*json.Require<std::vector<int64_t>>("il"), ElementsAre(1, 2));
  EXPECT_THAT(*json.Require<std::vector<std::string>>("sl"), ElementsAre("a"));

  EXPECT_EQ(Message(json.Require<int64_t>("f")),
            "m/config.json: f: expected an integer, found a number with a fraction or an exponent");
  EXPECT_EQ(Message(json.Require<double>("big")), "m/config.json: big: 9007199254740993 has no exact double");
  EXPECT_EQ(Message(json.Require<bool>("i")), "m/config.json: i: expected a boolean, found an integer");
  EXPECT_EQ(Message(json.Require<std::string>("b")), "m/config.json: b: expected a string, found a boolean");
  EXPECT_EQ(Message(json.Require<double>("s")), "m/config.json: s: expected a number, found a string");
  EXPECT_EQ(Message(json.Require<std::vector<int64_t>>("mixed")),
            "m/config.json: mixed[1]: expected an integer, found a string");
  EXPECT_EQ(Message(json.Require<std::vector<int64_t>>("i")),
            "m/config.json: i: expected a list, found an integer");
  EXPECT_EQ(Message(json.Require<JsonObject>("il")), "m/config.json: il: expected an object, found a list");
  EXPECT_EQ(Message(json.Require<JsonObject>("o")->Require<bool>("k")),
            "m/config.json: o.k: expected a boolean, found an integer");
}

TEST(JsonObjectTest, NullCountsAsAbsent) {
  const JsonObject json = Read(R"({"n": null})");
  EXPECT_FALSE(json.Find<int64_t>("n")->has_value());
  EXPECT_FALSE(json.Find<JsonObject>("n")->has_value());
  EXPECT_FALSE(json.Find<int64_t>("nowhere")->has_value());
  EXPECT_FALSE(json.Has("n"));
  EXPECT_EQ(Message(json.Require<int64_t>("n")), "m/config.json: n: is null, but has to be given");
  EXPECT_TRUE(json.CheckAllKeysRead({}).ok());
}

TEST(JsonObjectTest, IntegersStayInsideTheirRange) {
  const JsonObject json = Read(R"({"i": 3})");
  EXPECT_EQ(*json.RequireInt("i", 3, 3), 3);
  EXPECT_EQ(Message(json.RequireInt("i", 4, 9)), "m/config.json: i: 3 is outside [4, 9]");
  EXPECT_EQ(Message(json.FindInt("i", 0, 2)), "m/config.json: i: 3 is outside [0, 2]");
  EXPECT_FALSE(json.FindInt("j", 0, 2)->has_value());
  EXPECT_EQ(Message(json.RequireInt("j", 0, 2)), "m/config.json: missing key j");
}

TEST(JsonObjectTest, AMissingKeyPointsToItsMisspelling) {
  const JsonObject json = Read(R"({"t": {"hidden_sise": 3, "other": 1}})");
  EXPECT_EQ(Message(json.Require<JsonObject>("t")->Require<int64_t>("hidden_size")),
            "m/config.json: missing key t.hidden_size; there is t.hidden_sise: is t.hidden_size meant?");
}

// The keys of an object whose own name is wrong are all missing; the message says what is really wrong.
TEST(JsonObjectTest, AMissingKeyPointsToItsMisspeltObject) {
  const JsonObject json = Read(R"({"text_konfig": {"hidden_size": 3}, "known": 1})");
  ASSERT_FALSE(json.Find<JsonObject>("text_config")->has_value());
  ASSERT_TRUE(json.Find<int64_t>("known").ok());
  EXPECT_EQ(Message(json.Require<int64_t>("hidden_size")),
            "m/config.json: missing key hidden_size; there is text_konfig: is text_config meant?");
  EXPECT_EQ(Message(json.Require<int64_t>("known2")),
            "m/config.json: missing key known2; there is text_konfig: is text_config meant?");
}

TEST(JsonObjectTest, EveryUnreadKeyIsFound) {
  const JsonObject json =
      Read(R"({"a": 1, "o": {"x": 1, "y": {"z": 1}}, "free": {"q": {"r": 1}}, "n": null})");
  EXPECT_EQ(json.UnreadKeys({}).size(), 4u);
  EXPECT_EQ(Message(json.CheckAllKeysRead({})), "m/config.json: unlisted key a (and 3 more)");
  ASSERT_TRUE(json.Require<int64_t>("a").ok());
  ASSERT_TRUE(json.Find<int64_t>("n").ok());
  const JsonObject nested = *json.Require<JsonObject>("o");  // reading an object does not read what is in it
  EXPECT_THAT(json.UnreadKeys({"free"}),
              ElementsAre("m/config.json: unlisted key o.x", "m/config.json: unlisted key o.y"));
  EXPECT_THAT(json.UnreadKeys({"free", "o.y"}), ElementsAre("m/config.json: unlisted key o.x"));
  ASSERT_TRUE(nested.Require<int64_t>("x").ok());
  EXPECT_TRUE(json.CheckAllKeysRead({"free", "o.y"}).ok());
  ASSERT_TRUE(nested.Require<JsonObject>("y").ok());
  EXPECT_EQ(Message(json.CheckAllKeysRead({"free"})), "m/config.json: unlisted key o.y.z");
  EXPECT_TRUE(nested.CheckAllKeysRead({"y.z"}).ok());  // paths are relative to the object that is asked
}

TEST(JsonObjectTest, AnUnlistedKeyPointsToWhatWasMeant) {
  const JsonObject json = Read(R"({"slidng_window": 64, "top_q": 1, "zzz": 1})");
  ASSERT_TRUE(json.Find<int64_t>("sliding_window").ok());
  ASSERT_TRUE(json.Find<int64_t>("top_p").ok());
  EXPECT_THAT(
      json.UnreadKeys({}),
      ElementsAre("m/config.json: unlisted key slidng_window (is sliding_window meant?)",
                  "m/config.json: unlisted key top_q (is top_p meant?)", "m/config.json: unlisted key zzz"));
}

// A key that contains dots is not the nested key that it looks like.
TEST(JsonObjectTest, ADottedKeyIsNoPath) {
  const JsonObject json = Read(R"({"a": {"b": 1}, "a.b": 2})");
  ASSERT_TRUE(json.Require<JsonObject>("a")->Require<int64_t>("b").ok());
  EXPECT_EQ(Message(json.CheckAllKeysRead({})), "m/config.json: unlisted key a.b");
  EXPECT_EQ(Message(json.CheckAllKeysRead({"a.b"})), "m/config.json: unlisted key a.b");
}

TEST(JsonObjectTest, AskedKeysListsWhatTheCodeKnows) {
  const JsonObject json = Read(R"({"o": {}})");
  ASSERT_TRUE(json.Require<JsonObject>("o")->Find<bool>("k").ok());
  ASSERT_TRUE(json.CheckAllKeysRead({"i.j"}).ok());
  EXPECT_THAT(json.AskedKeys(), ElementsAre("i.j", "o", "o.k"));
}

TEST(JsonObjectTest, PlacesOfOneKeyHaveToAgree) {
  const JsonObject json = Read(R"({"o": {"a": 1, "l": [1, 2], "t": 1.5}, "a": 1, "l": [1, 3], "t": 2})");
  const JsonObject nested = *json.Require<JsonObject>("o");
  const auto a = FindAgreeing<int64_t>({{nested, "a"}, {json, "a"}});
  ASSERT_TRUE(a.ok()) << a.status();
  EXPECT_EQ((*a)->value, 1);
  EXPECT_EQ((*a)->place.Path(), "o.a");
  EXPECT_EQ(Message(FindAgreeing<std::vector<int64_t>>({{nested, "l"}, {json, "l"}})),
            "m/config.json: l: [1, 3] contradicts o.l, which is [1, 2]");
  EXPECT_EQ(Message(FindAgreeing<double>({{nested, "t"}, {json, "t"}})),
            "m/config.json: t: 2 contradicts o.t, which is 1.5");
  EXPECT_FALSE((*FindAgreeing<bool>({{nested, "none"}, {json, "none"}})).has_value());
  EXPECT_EQ(Message(RequireAgreeing<bool>({{nested, "none"}, {json, "none"}})),
            "m/config.json: missing key o.none (or none)");
  EXPECT_EQ(Message(RequireAgreeing<bool>({{json, "none"}})), "m/config.json: missing key none");
}

TEST(JsonObjectTest, OnlyAnObjectIsAConfiguration) {
  EXPECT_EQ(Message(JsonObject::Parse("[1]", "f")), "f: expected an object, found a list");
  EXPECT_THAT(Message(JsonObject::Parse("{\"a\":1,\"a\":2}", "f")), HasSubstr("a: the key appears twice"));
}

TEST(NearestNameTest, ProposesOnlyWhatIsClose) {
  EXPECT_EQ(NearestName("hidden_sise", {"head_dim", "hidden_size"}), "hidden_size");
  EXPECT_EQ(NearestName("hiddensize", {"hidden_size"}), "hidden_size");
  EXPECT_EQ(NearestName("hiddne_size", {"hidden_size"}), "hidden_size");
  EXPECT_EQ(NearestName("hidden", {"hidden_size"}), "");
  EXPECT_EQ(NearestName("ab", {"cd"}), "");
  EXPECT_EQ(NearestName("", {"a"}), "");
  EXPECT_EQ(NearestName(std::string(1 << 20, 'a'), {std::string(1 << 20, 'b')}), "");
}

}  // namespace
}  // namespace dflash
