// Reference of Gated DeltaNet over one sequence: the recurrence as the model's definition writes it, token
// after token, no records and no chunks. Acc = double is the oracle of every backend's test.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/gated_delta_net/gated_delta_net.h"

namespace dflash {

// x / sqrt(sum x^2 + 1e-6) * scale
template <typename Acc>
std::vector<Acc> L2NormRef(const float* x, int64_t size, Acc scale) {
  Acc sum = 0;
  for (int64_t d = 0; d < size; ++d) sum += Acc(x[d]) * Acc(x[d]);
  std::vector<Acc> y(static_cast<size_t>(size));
  for (int64_t d = 0; d < size; ++d)
    y[static_cast<size_t>(d)] = Acc(x[d]) / std::sqrt(sum + Acc(1e-6)) * scale;
  return y;
}

template <typename Acc>
Acc SoftplusRef(Acc x) {
  return x > Acc(20) ? x : std::log1p(std::exp(x));
}

// qkv: [T, QkvCols()], beta and decay (logits b and a): [T, value_heads], a_log and dt_bias: [value_heads],
// all dense. state: [value_heads, key_dim, value_dim], advanced over all T rows. o: [T, value_heads *
// value_dim].
template <typename Acc>
void GatedDeltaNetRef(const GatedDeltaNetShape& shape, const float* qkv, const float* beta,
                      const float* decay, const float* a_log, const float* dt_bias, int64_t T, Acc* state,
                      Acc* o) {
  const int64_t keys = shape.key_dim, values = shape.value_dim;
  const int64_t group = shape.value_heads / shape.key_heads;
  for (int64_t t = 0; t < T; ++t, qkv += shape.QkvCols()) {
    for (int64_t j = 0; j < shape.value_heads; ++j) {
      const int64_t key_head = j / group;
      const std::vector<Acc> q =
          L2NormRef<Acc>(qkv + key_head * keys, keys, Acc(1) / std::sqrt(static_cast<Acc>(keys)));
      const std::vector<Acc> k = L2NormRef<Acc>(qkv + (shape.key_heads + key_head) * keys, keys, Acc(1));
      const float* v = qkv + 2 * shape.key_heads * keys + j * values;
      const Acc b = Acc(1) / (Acc(1) + std::exp(-Acc(beta[t * shape.value_heads + j])));
      const Acc g =
          -std::exp(Acc(a_log[j])) * SoftplusRef(Acc(decay[t * shape.value_heads + j]) + Acc(dt_bias[j]));
      Acc* S = state + j * keys * values;
      for (int64_t i = 0; i < keys * values; ++i) S[i] *= std::exp(g);
      for (int64_t e = 0; e < values; ++e) {
        Acc seen = 0;
        for (int64_t d = 0; d < keys; ++d) seen += S[d * values + e] * k[static_cast<size_t>(d)];
        const Acc c = b * (Acc(v[e]) - seen);
        for (int64_t d = 0; d < keys; ++d) S[d * values + e] += k[static_cast<size_t>(d)] * c;
        Acc out = 0;
        for (int64_t d = 0; d < keys; ++d) out += S[d * values + e] * q[static_cast<size_t>(d)];
        o[(t * shape.value_heads + j) * values + e] = out;
      }
    }
  }
}

}  // namespace dflash
