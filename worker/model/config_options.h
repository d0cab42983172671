// What all configuration readers of this folder share.
#pragma once

#include <cstdint>

#include "base/json_value.h"
#include "kernels/sampling/sampling.h"  // kMaxVocabulary

namespace dflash {

struct ConfigOptions {
  // Accept keys that docs/config-keys.md does not list; they end up in the configuration's `warnings`.
  // Everything else stays strict: missing, contradicting and refused keys are errors all the same.
  bool allow_unlisted_keys = false;
};

// The name of the configuration in a model folder.
inline constexpr char kConfigFile[] = "config.json";

// Bounds on values of a configuration, so that no product of a tensor's dimensions overflows int64.
inline constexpr int64_t kMaxWidth = 1 << 20;  // hidden and intermediate sizes, head sizes, counts of heads
inline constexpr int64_t kMaxLayers = 1024;
inline constexpr int64_t kMaxPositions = int64_t{1} << 30;
inline constexpr double kMaxRopeTheta = 1e12;
inline constexpr double kMaxNormEps = 1e-2;

}  // namespace dflash
