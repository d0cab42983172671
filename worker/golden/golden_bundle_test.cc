// Golden bundles: what is read, what is refused, and what a comparison finds.
#include "worker/golden/golden_bundle.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash::golden {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using Json = nlohmann::ordered_json;

const fs::path kGolden = fs::path(DFLASHD_SOURCE_DIR) / "tests/golden";

class GoldenBundleTest : public ::testing::Test {
 protected:
  GoldenBundleTest()
      : folder_(fs::path(::testing::TempDir()) / ("golden_bundle_test." + std::to_string(getpid()))) {
    fs::remove_all(folder_);
  }
  ~GoldenBundleTest() override { fs::remove_all(folder_); }

  static RecordedBundle Small() {
    RecordedBundle bundle;
    bundle.producer = "a test";
    bundle.contract = GoldenBundle::Open(kGolden)->contract();
    bundle.prompts = {
        {.kind = "chat",
         .text = "Hi",
         .prompt_ids = {1, 2, 3},
         .output_ids = {4, 5},
         .acceptance_lengths = {2, 1},
         .chat = GoldenChat{.messages = {{{"role", "user"}, {"content", "Hi"}}}, .enable_thinking = true}}};
    bundle.drafter_weights = {{"fc.weight", "00ff"}};
    bundle.tensors = {{"p0.taps_last16", {2, 3}, {1, 2, 3, 4, 5, 6}},
                      {"p0.draft_logits", {1, 4}, {0.5, -1, 0, 2}}};
    return bundle;
  }
  std::string Write(const RecordedBundle& bundle, const std::string& name) const {
    const std::string path = folder_ / name;
    EXPECT_EQ(WriteBundle(bundle, path), absl::OkStatus());
    return path;
  }

  fs::path folder_;
};

TEST_F(GoldenBundleTest, ReadsTheGoldenData) {
  const absl::StatusOr<GoldenBundle> bundle = GoldenBundle::Open(kGolden);
  ASSERT_TRUE(bundle.ok()) << bundle.status();
  EXPECT_EQ(bundle->prompts().size(), 21u);
  EXPECT_EQ(bundle->contract().taps, (std::vector<int32_t>{1, 3, 5}));
  EXPECT_EQ(bundle->contract().layers.size(), 4u);
  EXPECT_EQ(bundle->contract().layers[3].window, 0);
  EXPECT_TRUE(bundle->HasTensors(16));
  EXPECT_FALSE(bundle->HasTensors(1));
  EXPECT_EQ(bundle->Tensor(0, "draft_logits")->cols, 4096);
  EXPECT_EQ(bundle->Tensor(0, "last_logits")->rows, 1);
  EXPECT_TRUE(absl::IsNotFound(bundle->Tensor(1, "draft_logits").status()));
  int chats = 0, thinking = 0;
  for (const GoldenPrompt& prompt : bundle->prompts()) {
    chats += prompt.chat.has_value();
    thinking += prompt.chat && *prompt.chat->enable_thinking;
  }
  EXPECT_EQ(chats, 16);
  EXPECT_GT(thinking, 0);
  EXPECT_LT(thinking, 16);
}

TEST_F(GoldenBundleTest, WhatIsWrittenReadsBack) {
  const RecordedBundle written = Small();
  const std::string path = Write(written, "one");
  EXPECT_TRUE(absl::IsAlreadyExists(WriteBundle(written, path)));
  const absl::StatusOr<GoldenBundle> read = GoldenBundle::Open(path);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->contract(), written.contract);
  EXPECT_EQ(read->drafter_weights(), written.drafter_weights);
  const GoldenPrompt& prompt = read->prompts().at(0);
  EXPECT_EQ(prompt.prompt_ids, written.prompts[0].prompt_ids);
  EXPECT_EQ(prompt.acceptance_lengths, written.prompts[0].acceptance_lengths);
  EXPECT_EQ(prompt.chat->messages, written.prompts[0].chat->messages);
  EXPECT_EQ(read->Tensor(0, "taps_last16")->values, written.tensors[0].values);
}

TEST_F(GoldenBundleTest, ComparisonNamesTheFirstDifference) {
  const GoldenBundle expected = GoldenBundle::Open(Write(Small(), "expected")).value();
  const auto first = [&](const std::string& name, const std::function<void(RecordedBundle&)>& change) {
    RecordedBundle bundle = Small();
    change(bundle);
    const GoldenBundle actual = GoldenBundle::Open(Write(bundle, name)).value();
    const BundleComparison comparison = CompareBundles(actual, expected, 1e-3).value();
    const BundleComparison::Line* line = comparison.first_difference();
    return line == nullptr ? std::string() : line->interface + ": " + line->what;
  };
  EXPECT_EQ(first("same", [](RecordedBundle&) {}), "");
  EXPECT_EQ(first("rounding", [](RecordedBundle& b) { b.tensors[0].values[0] += 1e-4; }), "");
  EXPECT_THAT(first("taps",
                    [](RecordedBundle& b) {
                      b.tensors[0].values[0] += 1;
                      b.tensors[1].values[0] += 1;  // what follows from it
                    }),
              HasSubstr("tap-layer: taps_last16 of prompt 0"));
  EXPECT_THAT(first("nan", [](RecordedBundle& b) { b.tensors[1].values[0] = NAN; }),
              HasSubstr("draft-logits"));
  EXPECT_THAT(first("window", [](RecordedBundle& b) { b.contract.layers[0].window = 63; }),
              HasSubstr("sliding:63:causal"));
  EXPECT_THAT(first("weights", [](RecordedBundle& b) { b.drafter_weights["fc.weight"] = "11"; }),
              HasSubstr("revisions"));
  EXPECT_THAT(first("tokens", [](RecordedBundle& b) { b.prompts[0].prompt_ids[1] = 9; }),
              HasSubstr("tokenizer"));
  EXPECT_THAT(first("rounds", [](RecordedBundle& b) { b.prompts[0].acceptance_lengths[0] = 1; }),
              HasSubstr("end-to-end"));
  // The last round is counted in more than one way.
  EXPECT_EQ(first("last round", [](RecordedBundle& b) { b.prompts[0].acceptance_lengths[1] = 2; }), "");
}

TEST_F(GoldenBundleTest, RefusesWhatIsNoBundle) {
  const std::string path = Write(Small(), "bad");
  std::ifstream file(path + "/bundle.json");
  const Json good = Json::parse(file);
  const auto error = [&](const std::function<void(Json&)>& change) {
    Json json = good;
    change(json);
    std::ofstream(path + "/bundle.json") << json.dump();
    return std::string(GoldenBundle::Open(path).status().message());
  };
  EXPECT_EQ(error([](Json&) {}), "");
  EXPECT_THAT(error([](Json& j) { j["format"] = "other"; }), HasSubstr("format"));
  EXPECT_THAT(error([](Json& j) { j.erase("contract"); }), HasSubstr("contract"));
  EXPECT_THAT(error([](Json& j) { j["contract"]["layers"][0]["window"] = -1; }), HasSubstr("window"));
  EXPECT_THAT(error([](Json& j) { j["contract"]["layers"][0]["kind"] = "round"; }), HasSubstr("kind"));
  EXPECT_THAT(error([](Json& j) { j["contract"]["theta"] = 1; }), HasSubstr("theta: unknown key"));
  EXPECT_THAT(error([](Json& j) { j["contract"]["target_layer_ids"] = {1.5}; }),
              HasSubstr("target_layer_ids"));
  EXPECT_THAT(error([](Json& j) { j["contract"]["target_layer_ids"] = Json::array(); }), HasSubstr("empty"));
  EXPECT_THAT(error([](Json& j) { j["tensors"] = "../x"; }), HasSubstr("tensors"));
  EXPECT_THAT(error([](Json& j) { j["prompts"] = "none.json"; }), HasSubstr("none.json"));
  EXPECT_THAT(error([](Json& j) {
                j["chats"] = {{"7", {{"messages", Json::array()}}}};
              }),
              HasSubstr("chats"));
  EXPECT_THAT(error([](Json& j) { j["extra"] = 1; }), HasSubstr("extra: unknown key"));
  EXPECT_TRUE(absl::IsNotFound(GoldenBundle::Open((folder_ / "nowhere").string()).status()));
}

}  // namespace
}  // namespace dflash::golden
