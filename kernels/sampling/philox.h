// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and how this program
// addresses it: a random word is keyed by (request seed, absolute position, token id), so a token does not
// depend on the drafter, the round or the batch. Integer arithmetic only: the same words on every backend.
#pragma once

#include <cstdint>

#include "kernels/elementary/lane.h"

namespace dflash {

// Four 32-bit words: the generator's counter and its output.
struct PhiloxBlock {
  uint32_t word[4] = {0, 0, 0, 0};
};

inline constexpr uint32_t kPhiloxMultiplier0 = 0xd2511f53u;
inline constexpr uint32_t kPhiloxMultiplier1 = 0xcd9e8d57u;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9e3779b9u;
inline constexpr uint32_t kPhiloxWeyl1 = 0xbb67ae85u;
inline constexpr int kPhiloxRounds = 10;

// The generator: ten rounds over `counter` under the 64-bit key (low word first).
DFLASH_LANE_INLINE constexpr PhiloxBlock Philox4x32(PhiloxBlock counter, uint64_t key) {
  uint32_t key0 = static_cast<uint32_t>(key);
  uint32_t key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(kPhiloxMultiplier0) * counter.word[0];
    const uint64_t product1 = static_cast<uint64_t>(kPhiloxMultiplier1) * counter.word[2];
    counter = {
        {static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(product1),
         static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1, static_cast<uint32_t>(product0)}};
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return counter;
}

// What the words are used for; part of the counter, so that uses never share a word.
enum class NoiseStream : uint32_t {
  kTargetChoice = 0,
};

// The counter of the block that serves token ids 4 * id_block .. 4 * id_block + 3 at an absolute position:
// (position low, position high, id_block, stream).
DFLASH_LANE_INLINE constexpr PhiloxBlock NoiseCounter(int64_t position, uint32_t id_block,
                                                      NoiseStream stream) {
  const auto bits = static_cast<uint64_t>(position);
  return {{static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32), id_block,
           static_cast<uint32_t>(stream)}};
}

// The random word of one token id at one position: word id mod 4 of its block under key = seed.
DFLASH_LANE_INLINE constexpr uint32_t NoiseWord(uint64_t seed, int64_t position, int32_t id,
                                                NoiseStream stream) {
  const auto bits = static_cast<uint32_t>(id);
  return Philox4x32(NoiseCounter(position, bits / 4, stream), seed).word[bits % 4];
}

}  // namespace dflash
