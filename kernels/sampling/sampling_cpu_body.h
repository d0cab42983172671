// Included by sampling_cpu_{scalar,avx2,avx512}.cc.
#pragma once

#include <cstdint>

#include "kernels/device/cpu/simd.h"
#include "kernels/elementary/elementary.h"
#include "kernels/sampling/gumbel.h"
#include "kernels/sampling/philox.h"
#include "kernels/sampling/sampling_cpu.h"

namespace dflash {
namespace DFLASH_SIMD_NAMESPACE {

inline constexpr float kInfinity = __builtin_inff();

// 0, 1, ... 15; ids stay below 2^24, so float lanes hold them exactly.
DFLASH_SIMD_INLINE F32x16 FirstIds() {
  alignas(64) static constexpr float kIds[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return Load(kIds);
}

DFLASH_SIMD_INLINE int LanesAt(int64_t n, int64_t size) {
  if (n >= size) return 0;
  return size - n < kLanes ? static_cast<int>(size - n) : kLanes;
}

// Logits [n, n + 16), -infinity beyond the vocabulary.
DFLASH_SIMD_INLINE F32x16 LoadLogits(const float* logits, int64_t n, int64_t vocabulary) {
  const int lanes = LanesAt(n, vocabulary);
  if (lanes == kLanes) return Load(logits + n);
  if (lanes == 0) return F32x16::Broadcast(-kInfinity);
  return Select(FirstIds() < F32x16::Broadcast(static_cast<float>(lanes)), LoadPartial(logits + n, lanes),
                F32x16::Broadcast(-kInfinity));
}

// The highest score of each lane with its first id, which is its lowest since ids come in ascending order.
struct Leaders {
  F32x16 score = F32x16::Broadcast(-kInfinity);
  F32x16 id = F32x16::Broadcast(-1);
};

DFLASH_SIMD_INLINE void Offer(Leaders& leaders, F32x16 score, F32x16 id) {
  const Mask16 higher = score > leaders.score;
  leaders.score = Select(higher, score, leaders.score);
  leaders.id = Select(higher, id, leaders.id);
}

DFLASH_SIMD_INLINE BestLogit Winner(const Leaders& leaders) {
  float scores[kLanes], ids[kLanes];
  Store(scores, leaders.score);
  Store(ids, leaders.id);
  BestLogit best = {-kInfinity, -1};
  for (int i = 0; i < kLanes; ++i) {
    const auto id = static_cast<int32_t>(ids[i]);
    if (id < 0) continue;
    if (best.id < 0 || scores[i] > best.logit || (scores[i] == best.logit && id < best.id))
      best = {scores[i], id};
  }
  return best;
}

static BestLogit FindBest(const float* logits, int64_t vocabulary) {
  Leaders leaders;
  const F32x16 zero = F32x16::Broadcast(0), one = F32x16::Broadcast(1),
               infinity = F32x16::Broadcast(kInfinity);
  F32x16 unusable = zero, id = FirstIds();
  for (int64_t n = 0; n < vocabulary; n += kLanes) {
    const F32x16 logit = LoadLogits(logits, n, vocabulary);
    unusable = Max(Select(logit < infinity, zero, one), unusable);  // NaN or +infinity
    Offer(leaders, logit, id);
    id = id + F32x16::Broadcast(kLanes);
  }
  if (ReduceMax(unusable) > 0) return {-kInfinity, -1};
  return Winner(leaders);
}

static int64_t NextAbove(const float* logits, int64_t from, int64_t vocabulary, float bound) {
  const F32x16 limit = F32x16::Broadcast(bound);
  for (int64_t n = from; n < vocabulary; n += kLanes) {
    if (!Any(LoadLogits(logits, n, vocabulary) > limit)) continue;
    for (; n < vocabulary; ++n) {
      if (logits[n] > bound) return n;
    }
  }
  return vocabulary;
}

static uint64_t TotalMass(const float* logits, int64_t vocabulary, float best, float temperature) {
  uint64_t total = 0;
  for (int64_t n = 0; n < vocabulary; n += kLanes) {
    float mass[kLanes];
    const F32x16 distance = LoadLogits(logits, n, vocabulary) - F32x16::Broadcast(best);
    Store(mass, Exp(distance / F32x16::Broadcast(temperature)) * F32x16::Broadcast(0x1p40f));
    for (int i = 0; i < kLanes; ++i) total += static_cast<uint64_t>(mass[i]);
  }
  return total;
}

static float ExpSum(const float* logits, int64_t vocabulary, float best) {
  F32x16 sum = F32x16::Broadcast(0);
  for (int64_t n = 0; n < vocabulary; n += kLanes)
    sum = sum + Exp(LoadLogits(logits, n, vocabulary) - F32x16::Broadcast(best));
  return ReduceAdd(sum);
}

// Philox4x32 of sixteen neighbouring counters; words[i] is the word of id 64 id_group + i.
DFLASH_SIMD_INLINE void NoiseWords(uint64_t seed, int64_t position, uint32_t id_group, float* words) {
  static constexpr uint32_t kCounters[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  float bits[kLanes];
  __builtin_memcpy(bits, kCounters, sizeof(bits));
  const PhiloxBlock first = NoiseCounter(position, id_group * kLanes, NoiseStream::kTargetChoice);
  I32x16 counter[4];
  for (int w = 0; w < 4; ++w) counter[w] = I32x16::Broadcast(static_cast<int32_t>(first.word[w]));
  counter[2] = counter[2] + BitsOf(Load(bits));
  auto key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    I32x16 high0, high1;
    const I32x16 low0 = MulWide(counter[0], kPhiloxMultiplier0, &high0);
    const I32x16 low1 = MulWide(counter[2], kPhiloxMultiplier1, &high1);
    counter[0] = high1 ^ counter[1] ^ I32x16::Broadcast(static_cast<int32_t>(key0));
    counter[2] = high0 ^ counter[3] ^ I32x16::Broadcast(static_cast<int32_t>(key1));
    counter[1] = low1;
    counter[3] = low0;
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  for (int w = 0; w < 4; ++w) {
    Store(bits, FromBits(counter[w]));
    for (int i = 0; i < kLanes; ++i) __builtin_memcpy(words + 4 * i + w, bits + i, sizeof(float));
  }
}

static int32_t Draw(const UnfilteredDraw& draw) {
  Leaders leaders;
  F32x16 id = FirstIds();
  const F32x16 infinity = F32x16::Broadcast(kInfinity), min_weight = F32x16::Broadcast(draw.min_weight);
  for (int64_t n = 0; n < draw.vocabulary; n += 4 * kLanes) {
    float words[4 * kLanes];
    NoiseWords(draw.seed, draw.position, static_cast<uint32_t>(n / (4 * kLanes)), words);
    for (int i = 0; i < 4; ++i) {
      const F32x16 logit = LoadLogits(draw.logits, n + i * kLanes, draw.vocabulary);
      const F32x16 log_weight = (logit - F32x16::Broadcast(draw.best)) / F32x16::Broadcast(draw.temperature);
      F32x16 score = log_weight + GumbelNoise<F32x16>(BitsOf(Load(words + i * kLanes)));
      if (draw.min_weight > 0) {
        score = Select(Exp(log_weight) >= min_weight, score, F32x16::Broadcast(0) - infinity);
      }
      Offer(leaders, score, id);
      id = id + F32x16::Broadcast(kLanes);
    }
  }
  return Winner(leaders).id;
}

inline constexpr SamplingKernels kTable = {FindBest, NextAbove, TotalMass, ExpSum, Draw};

}  // namespace DFLASH_SIMD_NAMESPACE

const SamplingKernels DFLASH_SIMD_NAME(kSamplingKernels) = DFLASH_SIMD_NAMESPACE::kTable;

}  // namespace dflash
