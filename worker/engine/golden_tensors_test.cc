// Hidden states, taps, logits, context features and draft logits of the tiny pair against what an independent
// implementation computes (tests/golden/README.md).
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "worker/model/state_export.h"
#include "worker/testing/tiny_pair.h"

namespace dflash {
namespace {

using testing::BackendDemands;
using testing::GoldenPrompt;
using testing::GoldenTensor;
using testing::LoadGoldenTensor;
using testing::LoadTinyPair;
using testing::RelativeError;
using testing::TinyPair;
using testing::TinyPairOptions;

// Worst error over the tensors of a prompt, by name.
std::map<std::string, double> Errors(size_t prompt_index, const TinyPairOptions& options = {}) {
  absl::StatusOr<TinyPair> pair = LoadTinyPair(options);
  EXPECT_TRUE(pair.ok()) << pair.status();
  absl::StatusOr<std::vector<GoldenPrompt>> prompts = testing::LoadGoldenPrompts();
  EXPECT_TRUE(prompts.ok()) << prompts.status();
  const std::vector<int32_t>& ids = (*prompts)[prompt_index].prompt_ids;
  const auto length = static_cast<int64_t>(ids.size());
  const std::string prefix = "p" + std::to_string(prompt_index) + ".";
  std::map<std::string, double> errors;
  const auto compare = [&](const std::string& name, const std::vector<float>& actual) {
    absl::StatusOr<GoldenTensor> golden = LoadGoldenTensor(prefix + name);
    ASSERT_TRUE(golden.ok()) << golden.status();
    ASSERT_EQ(actual.size(), golden->values.size()) << name;
    errors[name] = RelativeError(actual, golden->values);
  };

  std::vector<float> hidden_states;  // [states, min(P, 64), D]
  pair->target->set_observer([&](HiddenStateIndex state, Phase, ConstMatrixView rows) {
    EXPECT_EQ(Number(state),
              static_cast<int32_t>(hidden_states.size() /
                                   static_cast<size_t>(rows.cols * std::min<int64_t>(length, 64))));
    absl::StatusOr<std::vector<float>> values =
        ActivationsToHost(rows.Rows(0, std::min<int64_t>(length, 64)), *pair->stream);
    ASSERT_TRUE(values.ok());
    hidden_states.insert(hidden_states.end(), values->begin(), values->end());
  });
  absl::StatusOr<int32_t> slot = pair->table->Open();
  EXPECT_TRUE(slot.ok() && pair->table->Reserve(*slot, length + 64).ok() && pair->target->Open(*slot).ok() &&
              pair->drafter->Open(*slot, 0).ok());
  absl::StatusOr<ForwardResult> result = pair->target->Forward({.sequences = {{.slot = *slot,
                                                                               .phase = Phase::kPrefill,
                                                                               .start_position = 0,
                                                                               .tokens = ids,
                                                                               .parents = {},
                                                                               .last_logits = true}}});
  EXPECT_TRUE(result.ok()) << result.status();
  if (!result.ok()) return errors;
  compare("hidden_states", hidden_states);
  compare("last_logits", *ActivationsToHost(result->logits, *pair->stream));
  compare("taps_last16",
          *ActivationsToHost(ConstMatrixView(result->taps).Rows(length - 16, 16), *pair->stream));
  absl::Status ingested = pair->drafter->Ingest(
      result->taps,
      {{.slot = *slot, .phase = Phase::kPrefill, .first_row = 0, .row_count = length, .start_position = 0}});
  EXPECT_TRUE(ingested.ok()) << ingested;
  const ConstMatrixView features = pair->drafter->last_context_features();
  compare("context_feature_last16", *ActivationsToHost(features.Rows(features.rows - 16, 16), *pair->stream));
  const absl::Status proposed =
      pair->drafter->ProposeAt(*slot, (*prompts)[prompt_index].output_ids[0], length);
  EXPECT_TRUE(proposed.ok()) << proposed;
  compare("draft_logits", *ActivationsToHost(pair->drafter->last_draft_logits(), *pair->stream));
  return errors;
}

TEST(GoldenTensorsTest, MatchTheIndependentImplementation) {
  for (size_t prompt : {0, 3, 16}) {
    SCOPED_TRACE(prompt);
    const std::map<std::string, double> errors = Errors(prompt);
    ASSERT_EQ(errors.size(), 5u);
    for (const auto& [name, error] : errors) {
      EXPECT_LE(error, BackendDemands().tensors) << name;
      RecordProperty("p" + std::to_string(prompt) + "." + name, std::to_string(error));
      std::printf("p%zu.%s: max |error| / rms = %.2e\n", prompt, name.c_str(), error);
    }
  }
}

// The comparison must be sharp enough for mistakes that change no token. In bf16 it is not: rounding hides
// them, and what the float32 backend proves of the code that both share has to do.
TEST(GoldenTensorsTest, AWindowOffByOneIsSeen) {
  if (!BackendDemands().same_tokens) GTEST_SKIP() << "hidden by bf16 rounding";
  for (int64_t shift : {-1, 1}) {
    TinyPairOptions options;
    options.mutate_contract = [shift](FeatureContract& contract) {
      for (auto& mask : contract.layers) {
        if (mask.window > 0) mask.window += shift;
      }
    };
    EXPECT_GT(Errors(16, options)["draft_logits"], 10 * BackendDemands().tensors) << shift;
  }
}

TEST(GoldenTensorsTest, AWrongEpsIsSeen) {
  if (!BackendDemands().same_tokens) GTEST_SKIP() << "hidden by bf16 rounding";
  TinyPairOptions options;
  options.mutate_target_config = [](TargetConfig& config) { config.rms_norm_eps = 1e-5; };
  EXPECT_GT(Errors(0, options)["hidden_states"], 2 * BackendDemands().tensors);
}

TEST(GoldenTensorsTest, ATapOfTheLayerBeforeIsSeen) {
  TinyPairOptions options;
  options.mutate_contract = [](FeatureContract& contract) {
    for (LayerIndex& tap : contract.taps) tap = LayerIndex{Number(tap) - 1};
  };
  EXPECT_GT(Errors(0, options)["taps_last16"], 5 * std::max(0.1, BackendDemands().tensors));
}

// With every layer's input from another run, the tokens no longer matter: the logits are that run's, bit for
// bit.
TEST(GoldenTensorsTest, ForcedHiddenStatesAreTheInputsOfTheLayers) {
  absl::StatusOr<TinyPair> pair = LoadTinyPair({});
  ASSERT_TRUE(pair.ok()) << pair.status();
  const Stream& stream = *pair->stream;
  const std::vector<int32_t> ids = (*testing::LoadGoldenPrompts())[0].prompt_ids;
  std::vector<std::vector<char>> states;  // inputs of the layers
  const auto copy_bytes = [](ConstMatrixView rows) { return rows.rows * rows.cols * SizeOf(rows.dtype); };
  const auto logits = [&](const std::vector<int32_t>& tokens) {
    const int32_t slot = *pair->table->Open();
    EXPECT_TRUE(pair->table->Reserve(slot, static_cast<int64_t>(tokens.size())).ok());
    EXPECT_TRUE(pair->target->Open(slot).ok());
    const auto result = pair->target->Forward({.sequences = {{.slot = slot,
                                                              .phase = Phase::kPrefill,
                                                              .start_position = 0,
                                                              .tokens = tokens,
                                                              .parents = {},
                                                              .last_logits = true}}});
    EXPECT_TRUE(result.ok()) << result.status();
    std::vector<float> values = *ActivationsToHost(result->logits, stream);
    EXPECT_TRUE(pair->table->Close(slot).ok());
    return values;
  };
  pair->target->set_observer([&](HiddenStateIndex, Phase, ConstMatrixView rows) {
    states.emplace_back(static_cast<size_t>(copy_bytes(rows)));
    EXPECT_TRUE(CopyToHost(states.back().data(), rows.data, copy_bytes(rows), stream).ok());
  });
  const std::vector<float> expected = logits(ids);
  pair->target->set_observer({});
  const std::vector<int32_t> others(ids.rbegin(), ids.rend());
  EXPECT_NE(logits(others), expected);

  pair->target->set_forcing([&](HiddenStateIndex state, Phase, MatrixView rows) -> absl::StatusOr<bool> {
    const std::vector<char>& bytes = states[static_cast<size_t>(Number(state))];
    EXPECT_EQ(static_cast<int64_t>(bytes.size()), copy_bytes(rows));
    absl::Status status = CopyToDevice(rows.data, bytes.data(), copy_bytes(rows), stream);
    if (!status.ok()) return status;
    return true;
  });
  EXPECT_EQ(logits(others), expected);
  pair->target->set_forcing(
      [](HiddenStateIndex, Phase, MatrixView) -> absl::StatusOr<bool> { return false; });
  EXPECT_EQ(logits(ids), expected);
}

}  // namespace
}  // namespace dflash
