// The numbers of docs/spec/random-weights.md. Integers only, but for one conversion to float32 and one
// multiplication by a power of two, so every machine gets the same bits. Host and device.
#pragma once

#include <cstdint>

namespace dflash {

// How the elements of one tensor are made.
struct RandomTensor {
  uint64_t key = 0;  // tells tensors apart
  int64_t multiplier =
      0;  // of the noise, in units of 2^-32; the standard deviation is multiplier * 2^-16 / sqrt(3)
  int64_t centre = 0;  // in units of 2^-32
};

// Spreads 64 bits over 64 bits, one to one (the finalizer of SplitMix64: Steele, Lea, Flood, "Fast splittable
// pseudorandom number generators", OOPSLA 2014).
constexpr uint64_t MixBits(uint64_t z) {
  z ^= z >> 30;
  z *= 0xbf58476d1ce4e5b9u;
  z ^= z >> 27;
  z *= 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// Noise of element `index`: an integer in [-131070, 131070], the sum of four uniform 16-bit numbers less its
// mean.
constexpr int64_t RandomNoise(uint64_t key, uint64_t index) {
  const uint64_t z = MixBits(key + (index + 1) * 0x9e3779b97f4a7c15u);
  const uint64_t sum = (z & 0xffff) + ((z >> 16) & 0xffff) + ((z >> 32) & 0xffff) + (z >> 48);
  return static_cast<int64_t>(sum) - 131070;
}

// The element as float32; a bf16 tensor holds it rounded to nearest even.
constexpr float RandomElement(const RandomTensor& tensor, uint64_t index) {
  const int64_t fixed = tensor.centre + RandomNoise(tensor.key, index) * tensor.multiplier;
  return static_cast<float>(fixed) * 0x1p-32f;
}

}  // namespace dflash
