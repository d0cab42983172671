// What the kernels of sampling share: keys, reductions, sorting, selection by digits, the draw.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/elementary/elementary.h"
#include "kernels/sampling/gumbel.h"
#include "kernels/sampling/philox.h"
#include "kernels/sampling/sampling.h"

namespace dflash::backend {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr uint64_t kNone = ~uint64_t{0};  // above the key of every candidate
constexpr uint64_t kUnusable = 0;         // below the key of every candidate: a NaN or +infinity in the row
constexpr float kMinusInfinity = -__builtin_inff();

// ---- Keys: ascending keys are (value descending, id ascending).

__device__ __forceinline__ uint64_t SortKey(float value, int64_t id) {
  const uint32_t bits = __float_as_uint(value + 0.0f);  // + 0: the two zeros are equal
  const uint32_t ascending = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(~ascending) << 32 | static_cast<uint64_t>(id);
}
// Of a token's logit; kNone for minus infinity, which is never drawn.
__device__ __forceinline__ uint64_t CandidateKeyOf(float logit, int64_t id) {
  return logit == kMinusInfinity ? kNone : SortKey(logit, id);
}
__device__ __forceinline__ int32_t IdOf(uint64_t key) { return static_cast<int32_t>(key & 0xffffffffu); }
__device__ __forceinline__ float ValueOf(uint64_t key) {
  const uint32_t ascending = ~static_cast<uint32_t>(key >> 32);
  return __uint_as_float((ascending & 0x80000000u) != 0 ? ascending & 0x7fffffffu : ~ascending);
}

__device__ __forceinline__ float LogWeight(float logit, float best, float temperature) {
  return (logit - best) / temperature;
}
__device__ __forceinline__ uint64_t Mass(float logit, float best, float temperature) {
  return static_cast<uint64_t>(ExpF32(LogWeight(logit, best, temperature)) * 0x1p40f);
}
// The key of a token's score. min_weight: below it a token other than the best is out (kNone).
__device__ __forceinline__ uint64_t ScoreKey(float logit, int32_t id, uint32_t word,
                                             const SamplingParams& params, uint64_t best) {
  const float log_weight = LogWeight(logit, ValueOf(best), params.temperature);
  const float min_weight = fminf(params.min_p, 1.0f);
  if (min_weight > 0 && id != IdOf(best) && !(ExpF32(log_weight) >= min_weight)) return kNone;
  return SortKey(log_weight + GumbelNoiseF32(word), id);
}

// ---- Reductions and hand-over between blocks.

__device__ __forceinline__ uint64_t WarpMin(uint64_t value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, value, distance);
    value = other < value ? other : value;
  }
  return value;
}

__device__ __forceinline__ uint64_t WarpSum(uint64_t value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
  return value;
}

// Minimum or sum over the block, in every thread.
template <bool kMin>
__device__ __forceinline__ uint64_t BlockReduce(uint64_t value) {
  __shared__ uint64_t of_warp[32];
  value = kMin ? WarpMin(value) : WarpSum(value);
  __syncthreads();  // of_warp may still be read from the call before
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  const unsigned warps = blockDim.x / 32, lane = threadIdx.x % 32;
  value = lane < warps ? of_warp[lane] : (kMin ? kNone : 0);
  return kMin ? WarpMin(value) : WarpSum(value);
}

// Whether this block is the last of its row's to arrive; it then sees what the others wrote.
__device__ __forceinline__ bool ArrivesLast(int32_t* arrived) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(arrived, 1) == static_cast<int32_t>(gridDim.x) - 1;
    if (last) *arrived = 0;  // for the next launch
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}

// Rows whose token is drawn rather than known from the best key.
__device__ __forceinline__ bool IsDrawn(const SamplingParams& params, uint64_t best) {
  return best != kUnusable && best != kNone && !(params.temperature <= 0);
}
// Sorts keys[0, count), count a power of two.
__device__ __forceinline__ void SortBlock(uint64_t* keys, int count) {
  for (int size = 2; size <= count; size *= 2) {
    for (int distance = size / 2; distance > 0; distance /= 2) {
      for (int i = static_cast<int>(threadIdx.x); i < count / 2; i += static_cast<int>(blockDim.x)) {
        const int low = 2 * i - (i & (distance - 1)), high = low + distance;
        const bool ascending = (low & size) == 0;
        const uint64_t a = keys[low], b = keys[high];
        if ((a > b) == ascending) {
          keys[low] = b;
          keys[high] = a;
        }
      }
      __syncthreads();
    }
  }
}

// Adds `value` of every lane with `active` to sums[digit of the lane]: lanes of one digit together, since in
// most rows most lanes have the same.
__device__ __forceinline__ void AddByDigit(unsigned long long* sums, int digit, bool active, uint64_t value) {
  unsigned waiting = __ballot_sync(kAllLanes, active);
  while (waiting != 0) {
    const int chosen = __shfl_sync(kAllLanes, digit, __ffs(static_cast<int>(waiting)) - 1);
    const bool member = active && digit == chosen;
    const uint64_t sum = WarpSum(member ? value : 0);
    if (threadIdx.x % 32 == 0) atomicAdd(&sums[chosen], static_cast<unsigned long long>(sum));
    waiting &= ~__ballot_sync(kAllLanes, member);
  }
}

// The smallest key K such that the keys <= K among key_at(0), ..., key_at(count - 1), counted or weighed by
// `measure`, are enough; `limit` where all keys <= limit are not. kNone is no key. Eight digits of eight
// bits. One block of at least 256 threads; sums: one per digit, shared.
template <typename KeyAt, typename Measure, typename Enough>
__device__ __forceinline__ uint64_t SelectKey(int64_t count, const KeyAt& key_at, uint64_t limit,
                                              unsigned long long* sums, const Measure& measure,
                                              const Enough& is_enough) {
  __shared__ uint64_t digits, below;  // the chosen digits, and what lies below them
  if (threadIdx.x == 0) digits = below = 0;
  for (int shift = 56; shift >= 0; shift -= 8) {
    if (threadIdx.x < 256) sums[threadIdx.x] = 0;
    __syncthreads();
    const uint64_t prefix = digits;
    for (int64_t first = 0; first < count; first += blockDim.x) {  // whole warps
      const int64_t i = first + threadIdx.x;
      const uint64_t key = i < count ? key_at(i) : kNone;
      const bool active = key != kNone && key <= limit && (shift == 56 || key >> (shift + 8) == prefix);
      AddByDigit(sums, static_cast<int>(key >> shift & 255), active, active ? measure(key) : 0);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      uint64_t sum = below;
      int digit = 0;
      for (; digit < 256; ++digit) {
        if (sums[digit] != 0 && is_enough(sum + sums[digit])) break;
        sum += sums[digit];
      }
      digits = digit < 256 ? prefix << 8 | static_cast<uint64_t>(digit) : kNone;
      below = sum;
    }
    __syncthreads();
    if (digits == kNone) break;
  }
  const uint64_t key = digits;
  __syncthreads();  // before the next call clears it
  return key == kNone ? limit : key;
}

// Filters and draws from sorted keys of logits, the best of a row: the key of the winner's score, or kNone
// where top-p keeps more than `listed` (never with top-k and at least that many listed). total_mass: of the
// whole row, where there is no top-k. One warp; the result is in every lane.
__device__ __forceinline__ uint64_t DrawFromSorted(const uint64_t* keys, int listed,
                                                   const SamplingParams& params, uint64_t total_mass,
                                                   uint64_t best_key, int64_t position) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const float best = ValueOf(best_key);
  int kept = params.top_k > 0 ? min(listed, params.top_k) : listed;
  const auto mass_at = [&](int i) { return i < kept ? Mass(ValueOf(keys[i]), best, params.temperature) : 0; };
  if (params.top_p < 1) {
    uint64_t total = total_mass;
    if (params.top_k > 0) {
      total = 0;
      for (int i = lane; i < kept; i += 32) total += mass_at(i);
      total = WarpSum(total);
    }
    const double enough = static_cast<double>(params.top_p) * static_cast<double>(total);
    uint64_t before = 0;
    int length = 0;
    for (int first = 0; first < kept && length == 0; first += 32) {
      uint64_t sum = mass_at(first + lane);
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const uint64_t lower = __shfl_up_sync(kAllLanes, sum, distance);
        if (lane >= distance) sum += lower;
      }
      sum += before;
      const unsigned reached =
          __ballot_sync(kAllLanes, first + lane < kept && static_cast<double>(sum) >= enough);
      if (reached != 0) length = first + __ffs(static_cast<int>(reached));
      before = __shfl_sync(kAllLanes, sum, 31);
    }
    if (length == 0) return kNone;
    kept = length;
  }
  uint64_t key = kNone;
  for (int i = lane; i < kept; i += 32) {
    const int32_t id = IdOf(keys[i]);
    const uint32_t word = NoiseWord(params.seed, position, id, NoiseStream::kTargetChoice);
    key = min(key, ScoreKey(ValueOf(keys[i]), id, word, params, best_key));
  }
  return WarpMin(key);
}

}  // namespace dflash::backend
