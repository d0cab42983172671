// Element types of tensors and our own bfloat16, so that no header names a CUDA type.
#pragma once

#include <bit>
#include <cstdint>

namespace dflash {

enum class DType : uint8_t { kF32, kBf16 };

constexpr int64_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return 4;
    case DType::kBf16:
      return 2;
  }
  return 0;
}

constexpr const char* Name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "F32";
    case DType::kBf16:
      return "BF16";
  }
  return "?";
}

// The upper half of a float32.
struct bf16 {
  uint16_t bits = 0;

  bf16() = default;
  // Rounds to nearest, ties to even; a NaN stays a (quiet) NaN.
  explicit bf16(float value) {
    uint32_t word = std::bit_cast<uint32_t>(value);
    if ((word & 0x7fffffffu) > 0x7f800000u) {
      bits = static_cast<uint16_t>((word >> 16) | 0x0040u);
    } else {
      bits = static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
    }
  }
  explicit operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
  explicit operator double() const { return static_cast<double>(static_cast<float>(*this)); }
};
static_assert(sizeof(bf16) == 2);

template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kF32;
};
template <>
struct DTypeOf<bf16> {
  static constexpr DType value = DType::kBf16;
};

}  // namespace dflash
