// Golden bundles: what is read, what is refused, and what a comparison finds.
#include "worker/golden/golden_bundle.h"

#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash::golden {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
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
    bundle.target_digests = {{"norm.weight", "01"}};
    bundle.drafter_digests = {{"fc.weight", "11ff"}};
    bundle.tensors = {{"p0.taps_last16", {3, 3}, {1, 2, 3, 4, 5, 6, 7, 8, 9}},
                      {"p0.draft_logits", {15, 2}, std::vector<double>(30, 0.5)},
                      {"p0.hidden_states", {2, 3, 1}, {1, 2, 3, 4, 5, 6}},
                      {"p0.last_logits", {2}, {1, 2}},
                      {"p0.context_feature_last16", {3, 1}, {1, 2, 3}}};
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

// What tools/reference/checkpoint_files.py wrote is what we compute.
TEST_F(GoldenBundleTest, FingerprintsOfAnotherProgramAreOurs) {
  const GoldenBundle bundle = GoldenBundle::Open(kGolden).value();
  const std::string models = std::string(DFLASHD_SOURCE_DIR) + "/models/";
  const TargetConfig target = TargetConfig::Load(models + "tiny-qwen3.6").value();
  const DraftConfig drafter = DraftConfig::Load(models + "tiny-qwen3.6-dflash").value();
  EXPECT_EQ(TargetCheckpoint::Open(models + "tiny-qwen3.6", target)->fingerprints(), bundle.target_weights());
  EXPECT_EQ(DraftCheckpoint::Open(models + "tiny-qwen3.6-dflash", drafter)->fingerprints(),
            bundle.drafter_weights());
  EXPECT_EQ(bundle.drafter_weights().size(), 47u);
  EXPECT_EQ(TargetCheckpoint::Open(models + "tiny-qwen3.6", target)->ReadDigests().value(),
            bundle.target_digests());
  EXPECT_EQ(DraftCheckpoint::Open(models + "tiny-qwen3.6-dflash", drafter)->ReadDigests().value(),
            bundle.drafter_digests());
  EXPECT_EQ(bundle.CheckFits(SizesOf(target)), absl::OkStatus());
}

TEST_F(GoldenBundleTest, WhatIsWrittenReadsBack) {
  const RecordedBundle written = Small();
  const std::string path = Write(written, "one");
  EXPECT_TRUE(absl::IsAlreadyExists(WriteBundle(written, path)));
  const absl::StatusOr<GoldenBundle> read = GoldenBundle::Open(path);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->contract(), written.contract);
  EXPECT_EQ(read->drafter_weights(), written.drafter_weights);
  EXPECT_EQ(read->target_digests(), written.target_digests);
  EXPECT_EQ(read->drafter_digests(), written.drafter_digests);
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
  // What one side lacks is a difference, whichever it is.
  EXPECT_EQ(first("no tensor", [](RecordedBundle& b) { b.tensors.pop_back(); }),
            "fusion: context_feature_last16 of prompt 0: only the second bundle has it");
  EXPECT_EQ(first("no fingerprint", [](RecordedBundle& b) { b.drafter_weights.clear(); }),
            "revisions: fingerprint of drafter fc.weight: only the second bundle has it");
  EXPECT_EQ(first("another fingerprint", [](RecordedBundle& b) { b.target_weights["norm.weight"] = "1"; }),
            "revisions: fingerprint of target norm.weight: only the first bundle has it");
  EXPECT_EQ(first("another digest", [](RecordedBundle& b) { b.drafter_digests["fc.weight"] = "1"; }),
            "revisions: digest of drafter fc.weight");
  EXPECT_EQ(first("no chat", [](RecordedBundle& b) { b.prompts[0].chat.reset(); }),
            "template: chat of prompt 0: only the second bundle has it");
  EXPECT_EQ(first("another flag", [](RecordedBundle& b) { b.prompts[0].chat->enable_thinking = false; }),
            "template: chat of prompt 0");
  EXPECT_EQ(first("another prompt", [](RecordedBundle& b) { b.prompts.push_back(b.prompts[0]); }),
            "template: number of prompts: 2 and not 1");
  EXPECT_EQ(first("no lengths", [](RecordedBundle& b) { b.prompts[0].acceptance_lengths.clear(); }),
            "end-to-end: acceptance lengths of prompt 0: only the second bundle has it");
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
  EXPECT_THAT(error([](Json& j) { j["contract"]["block_size"] = 16.5; }),
              AllOf(HasSubstr("bundle.json: contract: block_size"), HasSubstr("whole number")));
  EXPECT_THAT(error([](Json& j) { j["contract"]["layers"][0]["window"] = 0.5; }), HasSubstr("window"));
  EXPECT_TRUE(absl::IsNotFound(GoldenBundle::Open((folder_ / "nowhere").string()).status()));
}

TEST_F(GoldenBundleTest, TheFirstFormatIsReadWithoutItsFingerprints) {
  const std::string path = Write(Small(), "first");
  std::ifstream file(path + "/bundle.json");
  Json json = Json::parse(file);
  json["format"] = "dflash-golden-1";
  std::ofstream(path + "/bundle.json") << json.dump();
  const absl::StatusOr<GoldenBundle> bundle = GoldenBundle::Open(path);
  ASSERT_TRUE(bundle.ok()) << bundle.status();
  EXPECT_TRUE(bundle->drafter_weights().empty());
}

// What a report or an error shows of a bundle neither moves a cursor nor begins a line of its own.
TEST_F(GoldenBundleTest, ShowsNoControlCharacters) {
  const auto error = [&](const std::string& file, const std::function<void(Json&)>& change) {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    const std::string path = Write(Small(), "shown");
    std::ifstream in(path + "/" + file);
    Json json = Json::parse(in);
    change(json);
    std::ofstream(path + "/" + file) << json.dump();
    return std::string(GoldenBundle::Open(path).status().message());
  };
  const auto expect = [](const std::string& message, const std::string& words) {
    EXPECT_THAT(message, HasSubstr(words));
    for (const char c : message) EXPECT_GE(static_cast<unsigned char>(c), 0x20) << message;
  };
  EXPECT_EQ(error("bundle.json", [](Json&) {}), "");
  EXPECT_EQ(error("bundle.json", [](Json& json) { json["producer"] = "\u00fcber \"x\" \u4e16"; }), "");
  for (const char* producer : {"me\nVerdict: healthy.", "\x1b[2J", "x\x7f", "\u009b2J"})
    expect(error("bundle.json", [&](Json& json) { json["producer"] = producer; }),
           "bundle.json: producer: control");
  expect(error("bundle.json", [](Json& json) { json["\x1b[2J\nx"] = 1; }), "unknown key");
  expect(error("bundle.json", [](Json& json) { json["chats"]["\x1b[2J"] = 1; }),
         "not the number of a prompt");
  expect(error("bundle.json", [](Json& json) { json["drafter_weights"]["\x1b[2J"] = "00"; }),
         "drafter_weights: control");
  expect(error("bundle.json", [](Json& json) { json["contract"]["layers"][0]["kind"] = "\x1b[2J"; }),
         "unknown: ");
  expect(error("prompts.json", [](Json& json) { json[0]["kind"] = "chat\n"; }), "kind: control");
  // A name that the system would cut.
  for (const char* key : {"tensors", "prompts"}) {
    expect(error("bundle.json",
                 [&](Json& json) { json[key] = json[key].get<std::string>() + std::string("\0.other", 7); }),
           absl::StrCat(key, ": control"));
  }
  RecordedBundle named = Small();
  named.tensors[0].name = "\x1b[2J";
  expect(std::string(GoldenBundle::Open(Write(named, "named")).status().message()), "not a tensor of one of");
}

// Shapes that the format or the pair does not have, and values that are no numbers, name file and tensor.
TEST_F(GoldenBundleTest, RefusesTensorsThatAreNotTheFormats) {
  int number = 0;
  const auto error = [&](const std::function<void(RecordedBundle&)>& change) {
    RecordedBundle bundle = Small();
    change(bundle);
    return std::string(
        GoldenBundle::Open(Write(bundle, absl::StrCat("tensors", number++))).status().message());
  };
  const auto reshaped = [&](size_t tensor, std::vector<int64_t> shape) {
    return error([&](RecordedBundle& b) {
      int64_t count = 1;
      for (const int64_t size : shape) count *= size;
      b.tensors[tensor].shape = shape;
      b.tensors[tensor].values.assign(static_cast<size_t>(count), 1);
    });
  };
  EXPECT_EQ(error([](RecordedBundle&) {}), "");
  EXPECT_THAT(reshaped(0, {4, 3}),
              AllOf(HasSubstr("tensors.safetensors: p0.taps_last16: shape [4, 3], wanted [3, any]")));
  EXPECT_THAT(reshaped(0, {2, 3}), HasSubstr("p0.taps_last16: shape [2, 3]"));
  EXPECT_THAT(reshaped(0, {3, 4}), HasSubstr("columns of 3 taps"));
  EXPECT_THAT(reshaped(0, {9}), HasSubstr("p0.taps_last16: shape [9]"));
  EXPECT_THAT(reshaped(1, {14, 2}), HasSubstr("p0.draft_logits: shape [14, 2], wanted [15, any]"));
  EXPECT_THAT(reshaped(1, {16, 2}), HasSubstr("block of 16"));
  EXPECT_THAT(reshaped(2, {2, 64, 1}), HasSubstr("p0.hidden_states: shape [2, 64, 1], wanted [any, 3, any]"));
  EXPECT_THAT(reshaped(2, {6, 1}), HasSubstr("p0.hidden_states"));
  EXPECT_THAT(reshaped(3, {2, 2}), HasSubstr("p0.last_logits: shape [2, 2], wanted [any]"));
  EXPECT_THAT(reshaped(4, {16, 1}), HasSubstr("p0.context_feature_last16: shape [16, 1]"));
  for (const double value : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    EXPECT_THAT(error([&](RecordedBundle& b) { b.tensors[1].values[7] = value; }),
                HasSubstr("tensors.safetensors: p0.draft_logits: element 7 is "));
  }
  for (const char* name : {"p1.draft_logits", "draft_logits", "p00.draft_logits", "px.draft_logits"})
    EXPECT_THAT(error([&](RecordedBundle& b) { b.tensors[1].name = name; }),
                HasSubstr("not a tensor of one of"));
  EXPECT_EQ(error([](RecordedBundle& b) { b.tensors[1].name = "p0.my_own"; }), "");
  EXPECT_THAT(error([](RecordedBundle& b) { b.prompts[0].acceptance_lengths = {17}; }),
              HasSubstr("prompts.json: prompt 0: acceptance_lengths"));
}

TEST_F(GoldenBundleTest, SaysWhetherItFitsAPair) {
  const PairSizes sizes = {.vocabulary = 6, .head_rows = 2, .hidden_size = 1, .layers = 1};
  const GoldenBundle bundle = GoldenBundle::Open(Write(Small(), "fits")).value();
  EXPECT_EQ(bundle.CheckFits(sizes), absl::OkStatus());
  EXPECT_EQ(bundle.CheckFits({}), absl::OkStatus());
  const auto error = [&](const std::function<void(PairSizes&)>& change) {
    PairSizes other = sizes;
    change(other);
    return std::string(bundle.CheckFits(other).message());
  };
  EXPECT_THAT(error([](PairSizes& s) { s.vocabulary = 5; }),
              HasSubstr("prompts.json: prompt 0: output_ids: token id 5, but the target's vocabulary has 5"));
  EXPECT_THAT(error([](PairSizes& s) { s.vocabulary = 3; }), HasSubstr("prompt 0: prompt_ids: token id 3"));
  EXPECT_THAT(error([](PairSizes& s) { s.layers = 2; }),
              HasSubstr("p0.hidden_states: shape [2, 3, 1], but of this pair it is [3, any, 1]"));
  EXPECT_THAT(error([](PairSizes& s) { s.hidden_size = 2; }), HasSubstr("p0.hidden_states"));
  EXPECT_THAT(error([](PairSizes& s) { s.head_rows = 3; }), HasSubstr("p0.last_logits: shape [2]"));
}

}  // namespace
}  // namespace dflash::golden
