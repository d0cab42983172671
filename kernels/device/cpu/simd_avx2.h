// Included by simd.h alone.
#pragma once

namespace dflash::simd_avx2 {

inline constexpr int kLanes = 16;

struct I32x16 {
  __m256i lo, hi;
  static DFLASH_SIMD_INLINE I32x16 Broadcast(int32_t x) {
    return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
  }
};
struct F32x16 {
  __m256 lo, hi;
  using Int = I32x16;
  static DFLASH_SIMD_INLINE F32x16 Broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
};
struct Mask16 {
  __m256 lo, hi;  // all bits of a lane
};

// All bits of lane i are set when first + i < n.
DFLASH_SIMD_INLINE __m256i LanesBelow(int first, int n) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n - first), index);
}

DFLASH_SIMD_INLINE F32x16 Load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
DFLASH_SIMD_INLINE F32x16 LoadPartial(const float* p, int n) {
  return {_mm256_maskload_ps(p, LanesBelow(0, n)),
          n > 8 ? _mm256_maskload_ps(p + 8, LanesBelow(8, n)) : _mm256_setzero_ps()};
}
DFLASH_SIMD_INLINE __m256 WidenBf16(__m128i halves) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
DFLASH_SIMD_INLINE F32x16 LoadBf16(const bf16* p) {
  const auto* halves = reinterpret_cast<const __m128i*>(p);
  return {WidenBf16(_mm_loadu_si128(halves)), WidenBf16(_mm_loadu_si128(halves + 1))};
}
DFLASH_SIMD_INLINE F32x16 LoadBf16Partial(const bf16* p, int n) {
  alignas(32) uint16_t bits[16] = {};
  for (int i = 0; i < n; ++i) bits[i] = p[i].bits;
  const auto* halves = reinterpret_cast<const __m128i*>(bits);
  return {WidenBf16(_mm_load_si128(halves)), WidenBf16(_mm_load_si128(halves + 1))};
}
DFLASH_SIMD_INLINE void Store(float* p, F32x16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
DFLASH_SIMD_INLINE void StorePartial(float* p, F32x16 a, int n) {
  _mm256_maskstore_ps(p, LanesBelow(0, n), a.lo);
  if (n > 8) _mm256_maskstore_ps(p + 8, LanesBelow(8, n), a.hi);
}

DFLASH_SIMD_INLINE F32x16 operator+(F32x16 a, F32x16 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
DFLASH_SIMD_INLINE F32x16 operator-(F32x16 a, F32x16 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
DFLASH_SIMD_INLINE F32x16 operator*(F32x16 a, F32x16 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
DFLASH_SIMD_INLINE F32x16 operator/(F32x16 a, F32x16 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
DFLASH_SIMD_INLINE F32x16 Fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
DFLASH_SIMD_INLINE F32x16 Sqrt(F32x16 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
DFLASH_SIMD_INLINE F32x16 Max(F32x16 a, F32x16 b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
DFLASH_SIMD_INLINE F32x16 Min(F32x16 a, F32x16 b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
DFLASH_SIMD_INLINE F32x16 Abs(F32x16 a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}

DFLASH_SIMD_INLINE Mask16 operator<(F32x16 a, F32x16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
DFLASH_SIMD_INLINE Mask16 operator<=(F32x16 a, F32x16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LE_OQ)};
}
DFLASH_SIMD_INLINE Mask16 operator>(F32x16 a, F32x16 b) { return b < a; }
DFLASH_SIMD_INLINE Mask16 operator>=(F32x16 a, F32x16 b) { return b <= a; }
DFLASH_SIMD_INLINE Mask16 IsNan(F32x16 a) {
  return {_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q)};
}
DFLASH_SIMD_INLINE F32x16 Select(Mask16 m, F32x16 if_true, F32x16 if_false) {
  return {_mm256_blendv_ps(if_false.lo, if_true.lo, m.lo), _mm256_blendv_ps(if_false.hi, if_true.hi, m.hi)};
}
DFLASH_SIMD_INLINE bool Any(Mask16 m) { return _mm256_movemask_ps(_mm256_or_ps(m.lo, m.hi)) != 0; }

DFLASH_SIMD_INLINE I32x16 BitsOf(F32x16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
DFLASH_SIMD_INLINE F32x16 FromBits(I32x16 a) {
  return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)};
}
DFLASH_SIMD_INLINE F32x16 ToFloat(I32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
DFLASH_SIMD_INLINE I32x16 operator+(I32x16 a, I32x16 b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
DFLASH_SIMD_INLINE I32x16 operator-(I32x16 a, I32x16 b) {
  return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
}
DFLASH_SIMD_INLINE I32x16 operator&(I32x16 a, I32x16 b) {
  return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
DFLASH_SIMD_INLINE I32x16 operator|(I32x16 a, I32x16 b) {
  return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
DFLASH_SIMD_INLINE I32x16 operator^(I32x16 a, I32x16 b) {
  return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)};
}
DFLASH_SIMD_INLINE __m256i MulWideHalf(__m256i a, __m256i factor, __m256i* high) {
  const __m256i even = _mm256_mul_epu32(a, factor);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), factor);
  *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
  return _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
}
DFLASH_SIMD_INLINE I32x16 MulWide(I32x16 a, uint32_t b, I32x16* high) {
  const __m256i factor = _mm256_set1_epi32(static_cast<int>(b));
  return {MulWideHalf(a.lo, factor, &high->lo), MulWideHalf(a.hi, factor, &high->hi)};
}
DFLASH_SIMD_INLINE I32x16 operator<<(I32x16 a, int n) {
  const __m128i count = _mm_cvtsi32_si128(n);
  return {_mm256_sll_epi32(a.lo, count), _mm256_sll_epi32(a.hi, count)};
}
DFLASH_SIMD_INLINE I32x16 operator>>(I32x16 a, int n) {
  const __m128i count = _mm_cvtsi32_si128(n);
  return {_mm256_sra_epi32(a.lo, count), _mm256_sra_epi32(a.hi, count)};
}

DFLASH_SIMD_INLINE float ReduceAdd(F32x16 a) {
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
DFLASH_SIMD_INLINE float ReduceMax(F32x16 a) {
  const __m256 eight = _mm256_max_ps(a.lo, a.hi);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

}  // namespace dflash::simd_avx2
