// The two numberings of hidden states are two types, so that "off by one" does not compile.
// Source: docs/spec/dflash.md, "Hidden-state taps".
#pragma once

#include <cstdint>

namespace dflash {

// A decoder layer, 0-based, as written in a drafter's `target_layer_ids`.
enum class LayerIndex : int32_t {};

// A hidden state: 0 is the embedding output, i + 1 is the residual stream after layer i (attention and MLP
// added, before any further norm).
enum class HiddenStateIndex : int32_t {};

// The only conversion between the two.
constexpr HiddenStateIndex OutputOf(LayerIndex layer) {
  return HiddenStateIndex{static_cast<int32_t>(layer) + 1};
}

constexpr int32_t Number(LayerIndex layer) { return static_cast<int32_t>(layer); }
constexpr int32_t Number(HiddenStateIndex state) { return static_cast<int32_t>(state); }

}  // namespace dflash
