// The feature contract: everything that target and drafter have to agree on for the drafter to see what it
// was trained on, as plain data. The drafter is built from it (not from the configuration file), it is logged
// as one line, exported as an info metric and compared between processes at start; tests inject integration
// defects by changing it. Sources: docs/spec/dflash.md "Checkpoint layout", "Forward pass", "Attention masks
// and the sliding window".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/layer_index.h"
#include "kernels/rms_norm/rms_norm.h"
#include "worker/model/checkpoint.h"
#include "worker/model/draft_config.h"

namespace dflash {

// What tap k of a layer is. There is one meaning; that it is written down lets processes of different
// versions notice.
enum class TapMeaning : uint8_t {
  kLayerOutput,  // residual stream after the MLP of layer k, before any further norm: hidden state
                 // OutputOf(k)
};

// How taps become a context feature.
enum class NormOrder : uint8_t {
  kProjectThenNorm,  // c = w * rms(fc [t_0; ...; t_{K-1}]), w the plain weight of hidden_norm, taps
                     // unnormalized
};

struct FeatureContract {
  std::string target_revision;   // Checkpoint::revision()
  std::string drafter_revision;  // Checkpoint::revision()
  std::vector<LayerIndex> taps;  // in the order of concatenation
  TapMeaning tap_meaning = TapMeaning::kLayerOutput;
  NormOrder norm_order = NormOrder::kProjectThenNorm;
  int32_t mask_token_id = 0;
  int64_t block_size = 0;
  std::vector<DraftLayerMask> layers;  // one per drafter layer
  double rope_theta = 0;
  double rotary_fraction = 1;  // of a head; the target's partial_rotary_factor is not the drafter's
  NormWeight norm_weight = NormWeight::kPlain;  // of all norms; the target's are 1 + w
  double rms_norm_eps = 0;

  // "taps=1,3,5 tap=layer_output ..."; the revisions cut to 12 digits.
  std::string ToLine() const;
};

FeatureContract MakeFeatureContract(const DraftConfig& config, const TargetCheckpoint& target,
                                    const DraftCheckpoint& drafter);

// FailedPrecondition, naming each field that differs with both values, unless the contracts are equal.
absl::Status CheckSameContract(const FeatureContract& ours, const FeatureContract& theirs);

}  // namespace dflash
