// Included by simd.h alone.
#pragma once

namespace dflash::simd_avx512 {

inline constexpr int kLanes = 16;

struct I32x16 {
  __m512i v;
  static DFLASH_SIMD_INLINE I32x16 Broadcast(int32_t x) { return {_mm512_set1_epi32(x)}; }
};
struct F32x16 {
  __m512 v;
  using Int = I32x16;
  static DFLASH_SIMD_INLINE F32x16 Broadcast(float x) { return {_mm512_set1_ps(x)}; }
};
struct Mask16 {
  __mmask16 v;
};

DFLASH_SIMD_INLINE __mmask16 FirstLanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

DFLASH_SIMD_INLINE F32x16 Load(const float* p) { return {_mm512_loadu_ps(p)}; }
DFLASH_SIMD_INLINE F32x16 LoadPartial(const float* p, int n) {
  return {_mm512_maskz_loadu_ps(FirstLanes(n), p)};
}
DFLASH_SIMD_INLINE F32x16 WidenBf16(__m256i halves) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}
DFLASH_SIMD_INLINE F32x16 LoadBf16(const bf16* p) {
  return WidenBf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
DFLASH_SIMD_INLINE F32x16 LoadBf16Partial(const bf16* p, int n) {
  return WidenBf16(_mm256_maskz_loadu_epi16(FirstLanes(n), p));
}
DFLASH_SIMD_INLINE void Store(float* p, F32x16 a) { _mm512_storeu_ps(p, a.v); }
DFLASH_SIMD_INLINE void StorePartial(float* p, F32x16 a, int n) {
  _mm512_mask_storeu_ps(p, FirstLanes(n), a.v);
}

DFLASH_SIMD_INLINE F32x16 operator+(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
DFLASH_SIMD_INLINE F32x16 operator-(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
DFLASH_SIMD_INLINE F32x16 operator*(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
DFLASH_SIMD_INLINE F32x16 operator/(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
DFLASH_SIMD_INLINE F32x16 Fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
DFLASH_SIMD_INLINE F32x16 Sqrt(F32x16 a) { return {_mm512_sqrt_ps(a.v)}; }
DFLASH_SIMD_INLINE F32x16 Max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
DFLASH_SIMD_INLINE F32x16 Min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
DFLASH_SIMD_INLINE F32x16 Abs(F32x16 a) { return {_mm512_abs_ps(a.v)}; }

DFLASH_SIMD_INLINE Mask16 operator<(F32x16 a, F32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
DFLASH_SIMD_INLINE Mask16 operator<=(F32x16 a, F32x16 b) {
  return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)};
}
DFLASH_SIMD_INLINE Mask16 operator>(F32x16 a, F32x16 b) { return b < a; }
DFLASH_SIMD_INLINE Mask16 operator>=(F32x16 a, F32x16 b) { return b <= a; }
DFLASH_SIMD_INLINE Mask16 IsNan(F32x16 a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)}; }
DFLASH_SIMD_INLINE F32x16 Select(Mask16 m, F32x16 if_true, F32x16 if_false) {
  return {_mm512_mask_blend_ps(m.v, if_false.v, if_true.v)};
}
DFLASH_SIMD_INLINE bool Any(Mask16 m) { return m.v != 0; }

DFLASH_SIMD_INLINE I32x16 BitsOf(F32x16 a) { return {_mm512_castps_si512(a.v)}; }
DFLASH_SIMD_INLINE F32x16 FromBits(I32x16 a) { return {_mm512_castsi512_ps(a.v)}; }
DFLASH_SIMD_INLINE F32x16 ToFloat(I32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
DFLASH_SIMD_INLINE I32x16 operator+(I32x16 a, I32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
DFLASH_SIMD_INLINE I32x16 operator-(I32x16 a, I32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
DFLASH_SIMD_INLINE I32x16 operator&(I32x16 a, I32x16 b) { return {_mm512_and_si512(a.v, b.v)}; }
DFLASH_SIMD_INLINE I32x16 operator|(I32x16 a, I32x16 b) { return {_mm512_or_si512(a.v, b.v)}; }
DFLASH_SIMD_INLINE I32x16 operator^(I32x16 a, I32x16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
DFLASH_SIMD_INLINE I32x16 MulWide(I32x16 a, uint32_t b, I32x16* high) {
  const __m512i factor = _mm512_set1_epi32(static_cast<int>(b));
  const __m512i even = _mm512_mul_epu32(a.v, factor);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a.v, 32), factor);
  high->v = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
  return {_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32))};
}
DFLASH_SIMD_INLINE I32x16 operator<<(I32x16 a, int n) {
  return {_mm512_sll_epi32(a.v, _mm_cvtsi32_si128(n))};
}
DFLASH_SIMD_INLINE I32x16 operator>>(I32x16 a, int n) {
  return {_mm512_sra_epi32(a.v, _mm_cvtsi32_si128(n))};
}

DFLASH_SIMD_INLINE float ReduceAdd(F32x16 a) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
DFLASH_SIMD_INLINE float ReduceMax(F32x16 a) {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

}  // namespace dflash::simd_avx512
