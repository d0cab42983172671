#include "worker/model/feature_contract.h"

#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

FeatureContract TinyContract() {
  const std::string models = std::string(DFLASHD_SOURCE_DIR) + "/models/";
  const auto target_config = TargetConfig::Load(models + "tiny-qwen3.6");
  const auto draft_config = DraftConfig::Load(models + "tiny-qwen3.6-dflash");
  const auto target = TargetCheckpoint::Open(models + "tiny-qwen3.6", *target_config);
  const auto drafter = DraftCheckpoint::Open(models + "tiny-qwen3.6-dflash", *draft_config);
  return MakeFeatureContract(*draft_config, *target, *drafter);
}

TEST(FeatureContractTest, OneLineSaysItAll) {
  FeatureContract contract = TinyContract();
  EXPECT_EQ(contract.target_revision.size(), 64u);
  EXPECT_NE(contract.target_revision, contract.drafter_revision);
  contract.target_revision = "0123456789abcdef";
  contract.drafter_revision = "fedcba9876543210";
  EXPECT_EQ(contract.ToLine(),
            "target_revision=0123456789ab drafter_revision=fedcba987654 taps=1,3,5 tap_meaning=layer_output "
            "norm_order=project_then_norm mask_token_id=4095 block_size=16 "
            "layers=sliding:64:causal,sliding:64:causal,sliding:64:causal,full:unlimited:bidirectional "
            "rope_theta=1e+06 rotary_fraction=1 norm_weight=plain rms_norm_eps=1e-06");
}

TEST(FeatureContractTest, EveryDifferenceIsNamed) {
  const FeatureContract ours = TinyContract();
  EXPECT_TRUE(CheckSameContract(ours, TinyContract()).ok());
  const std::pair<std::string, std::function<void(FeatureContract&)>> changes[] = {
      {"target_revision",
       [](FeatureContract& c) { c.target_revision.back() ^= 1; }},  // beyond the digits of the line
      {"drafter_revision", [](FeatureContract& c) { c.drafter_revision.back() ^= 1; }},
      {"taps is 1,3,5 here and 0,3,5 there", [](FeatureContract& c) { c.taps[0] = LayerIndex{0}; }},
      {"taps is 1,3,5 here and 3,1,5 there", [](FeatureContract& c) { std::swap(c.taps[0], c.taps[1]); }},
      {"taps is 1,3,5 here and 1,3 there", [](FeatureContract& c) { c.taps.pop_back(); }},
      {"mask_token_id is 4095 here and 4094 there", [](FeatureContract& c) { c.mask_token_id = 4094; }},
      {"block_size is 16 here and 15 there", [](FeatureContract& c) { c.block_size = 15; }},
      {"sliding:63:causal", [](FeatureContract& c) { c.layers[1].window = 63; }},
      {"sliding:unlimited:causal", [](FeatureContract& c) { c.layers[1].window = 0; }},
      {"sliding:64:bidirectional", [](FeatureContract& c) { c.layers[2].causal = false; }},
      {"full:64:causal", [](FeatureContract& c) { c.layers[0].kind = DraftLayerKind::kFull; }},
      {"layers is", [](FeatureContract& c) { c.layers.pop_back(); }},
      {"rope_theta is 1e+06 here and 1e+07 there", [](FeatureContract& c) { c.rope_theta = 1e7; }},
      {"rotary_fraction is 1 here and 0.25 there", [](FeatureContract& c) { c.rotary_fraction = 0.25; }},
      {"norm_weight is plain here and one_plus there",
       [](FeatureContract& c) { c.norm_weight = NormWeight::kOnePlus; }},
      {"rms_norm_eps is 1e-06 here and 1.0000000000000002e-06 there",
       [](FeatureContract& c) { c.rms_norm_eps = std::nextafter(1e-6, 1.0); }},
  };
  for (const auto& [message, change] : changes) {
    SCOPED_TRACE(message);
    FeatureContract theirs = ours;
    change(theirs);
    const absl::Status status = CheckSameContract(ours, theirs);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(message), Not(HasSubstr("; "))));
  }
  FeatureContract theirs = ours;
  theirs.block_size = 8;
  theirs.mask_token_id = 1;
  EXPECT_THAT(std::string(CheckSameContract(ours, theirs).message()),
              AllOf(HasSubstr("mask_token_id is 4095 here and 1 there; "),
                    HasSubstr("block_size is 16 here and 8 there")));
}

}  // namespace
}  // namespace dflash
