#include "worker/model/feature_contract.h"

#include <array>
#include <charconv>
#include <utility>

#include "absl/strings/str_join.h"

namespace dflash {
namespace {

constexpr size_t kRevisionDigits = 12;

const char* Name(TapMeaning meaning) {
  switch (meaning) {
    case TapMeaning::kLayerOutput:
      return "layer_output";
  }
  return "?";
}

const char* Name(NormOrder order) {
  switch (order) {
    case NormOrder::kProjectThenNorm:
      return "project_then_norm";
  }
  return "?";
}

const char* Name(NormWeight weight) {
  switch (weight) {
    case NormWeight::kPlain:
      return "plain";
    case NormWeight::kOnePlus:
      return "one_plus";
  }
  return "?";
}

std::string LayersText(const std::vector<DraftLayerMask>& layers) {
  return absl::StrJoin(layers, ",", [](std::string* out, const DraftLayerMask& layer) {
    switch (layer.kind) {
      case DraftLayerKind::kSliding:
        absl::StrAppend(out, "sliding");
        break;
      case DraftLayerKind::kFull:
        absl::StrAppend(out, "full");
        break;
    }
    absl::StrAppend(out, ":", layer.window == 0 ? "unlimited" : absl::StrCat(layer.window), ":",
                    layer.causal ? "causal" : "bidirectional");
  });
}

// The shortest text that reads back as the same double.
std::string ExactText(double value) {
  std::array<char, 64> text{};
  return std::string(text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr);
}

// Every field as text: the one list behind the log line and the comparison.
std::vector<std::pair<std::string, std::string>> Fields(const FeatureContract& contract) {
  return {
      {"target_revision", contract.target_revision},
      {"drafter_revision", contract.drafter_revision},
      {"taps",
       absl::StrJoin(contract.taps, ",",
                     [](std::string* out, LayerIndex layer) { absl::StrAppend(out, Number(layer)); })},
      {"tap_meaning", Name(contract.tap_meaning)},
      {"norm_order", Name(contract.norm_order)},
      {"mask_token_id", absl::StrCat(contract.mask_token_id)},
      {"block_size", absl::StrCat(contract.block_size)},
      {"layers", LayersText(contract.layers)},
      {"rope_theta", ExactText(contract.rope_theta)},
      {"rotary_fraction", ExactText(contract.rotary_fraction)},
      {"norm_weight", Name(contract.norm_weight)},
      {"rms_norm_eps", ExactText(contract.rms_norm_eps)},
  };
}

}  // namespace

std::string FeatureContract::ToLine() const {
  return absl::StrJoin(Fields(*this), " ",
                       [](std::string* out, const std::pair<std::string, std::string>& field) {
                         const bool revision = field.first.ends_with("_revision");
                         absl::StrAppend(out, field.first, "=",
                                         revision ? field.second.substr(0, kRevisionDigits) : field.second);
                       });
}

FeatureContract MakeFeatureContract(const DraftConfig& config, const TargetCheckpoint& target,
                                    const DraftCheckpoint& drafter) {
  FeatureContract contract;
  contract.target_revision = target.revision();
  contract.drafter_revision = drafter.revision();
  contract.taps = config.target_layer_ids;
  contract.mask_token_id = config.mask_token_id;
  contract.block_size = config.block_size;
  contract.layers = config.layers;
  contract.rope_theta = config.rope_theta;
  contract.rms_norm_eps = config.rms_norm_eps;
  return contract;
}

absl::Status CheckSameContract(const FeatureContract& ours, const FeatureContract& theirs) {
  const auto our_fields = Fields(ours);
  const auto their_fields = Fields(theirs);
  std::vector<std::string> differences;
  for (size_t i = 0; i < our_fields.size(); ++i) {
    if (our_fields[i].second == their_fields[i].second) continue;
    differences.push_back(absl::StrCat(our_fields[i].first, " is ", our_fields[i].second, " here and ",
                                       their_fields[i].second, " there"));
  }
  if (differences.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("feature contracts differ: ", absl::StrJoin(differences, "; ")));
}

}  // namespace dflash
