#include "worker/model/random_weights.h"

namespace dflash {
namespace {

constexpr int64_t kOne = int64_t{1} << 32;  // 1.0 in the units of RandomTensor

// FNV-1a, 64 bits.
uint64_t HashName(std::string_view text, uint64_t hash = 0xcbf29ce484222325u) {
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

// The largest integer whose square is at most `square`.
int64_t SquareRoot(uint64_t square) {
  uint64_t root = 0;
  for (uint64_t bit = uint64_t{1} << 31; bit != 0; bit /= 2) {
    const uint64_t next = root + bit;
    if (next * next <= square) root = next;
  }
  return static_cast<int64_t>(root);
}

// Multiplier for a standard deviation of sqrt(numerator / denominator).
int64_t MultiplierOf(uint64_t numerator, uint64_t denominator) {
  return SquareRoot(3 * numerator * static_cast<uint64_t>(kOne) / denominator);
}

}  // namespace

RandomTensor RandomTensorOf(ModelRole role, std::string_view name, const std::vector<int64_t>& shape,
                            uint64_t seed) {
  const bool is_target = role == ModelRole::kTarget;
  RandomTensor tensor;
  tensor.key = MixBits(HashName(name, HashName(is_target ? "target." : "drafter.")) +
                       MixBits(seed + 0x9e3779b97f4a7c15u));
  const auto inputs = static_cast<uint64_t>(shape.back());
  if (name.ends_with("norm.weight")) {
    // The target's norms multiply by 1 + w, but for the one inside Gated DeltaNet; the drafter's by w.
    const bool one_plus = is_target && !name.ends_with("linear_attn.norm.weight");
    tensor.centre = one_plus ? 0 : kOne;
    tensor.multiplier = MultiplierOf(1, 256);
  } else if (name.ends_with("A_log")) {
    tensor.centre = 3 * kOne / 2;
    tensor.multiplier = MultiplierOf(1, 4);
  } else if (name.ends_with("dt_bias")) {
    tensor.centre = -4 * kOne;
    tensor.multiplier = MultiplierOf(1, 1);
  } else if (name == "embed_tokens.weight") {
    tensor.multiplier = MultiplierOf(1, 1);
  } else if (name == "lm_head.weight") {
    tensor.multiplier = MultiplierOf(4, inputs);
  } else if (name.ends_with("o_proj.weight") || name.ends_with("out_proj.weight") ||
             name.ends_with("down_proj.weight")) {
    tensor.multiplier = MultiplierOf(1, 4 * inputs);
  } else {
    tensor.multiplier = MultiplierOf(1, inputs);
  }
  return tensor;
}

uint64_t TensorChecksum(const uint16_t* bits, int64_t count, int64_t first_index, uint64_t sum) {
  for (int64_t i = 0; i < count; ++i) {
    sum += (uint64_t{bits[i]} + 1) * (2 * static_cast<uint64_t>(first_index + i) + 1);
  }
  return sum;
}

}  // namespace dflash
