// Warpgroup matrix products of compute capability 9.0a: d[64, N] += a[64, 16] b[N, 16]', bf16 with float32
// sums, a and b in shared memory. Source: NVIDIA, "PTX ISA" 9.0, "wgmma".
//
// Element layout of d in thread t of the warpgroup (warp w = t / 32, lane l): d[4 j + e] is row
// 16 w + l / 4 + 8 (e / 2), column 8 j + 2 (l mod 4) + e mod 2.
#pragma once

#include <cstdint>

namespace dflash::ptx {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define DFLASH_HAS_WGMMA 1
#endif

// Describes an operand whose rows of 64 elements (128 bytes) follow each other with the 128-byte swizzle:
// the 16-byte piece p of row r lies at piece p xor (r mod 8). The address is a multiple of 1024, plus
// 32 bytes for each step of 16 along k.
__device__ __forceinline__ uint64_t SwizzledOperand(uint32_t shared_address) {
  return static_cast<uint64_t>((shared_address & 0x3ffffu) >> 4) | uint64_t{1} << 16 | uint64_t{64} << 32 |
         uint64_t{1} << 62;
}

// Describes an operand stored with k as its rows: tiles of 64 of its columns, `tile_bytes` apart, each as
// above with one row per k. The address is that of a multiple of 8 rows.
__device__ __forceinline__ uint64_t SwizzledTransposedOperand(uint32_t shared_address, uint32_t tile_bytes) {
  return static_cast<uint64_t>((shared_address & 0x3ffffu) >> 4) |
         static_cast<uint64_t>(tile_bytes >> 4) << 16 | uint64_t{64} << 32 | uint64_t{1} << 62;
}

// Keeps the compiler from moving accesses to the registers of a product across this place.
template <int kCount>
__device__ __forceinline__ void KeepInPlace(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void KeepInPlace(uint32_t (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(values[i])::"memory");
}

// Moves registers between warpgroups: every warp of a warpgroup calls it.
template <int kCount>
__device__ __forceinline__ void TakeRegisters() {
#ifdef DFLASH_HAS_WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}
template <int kCount>
__device__ __forceinline__ void GiveRegisters() {
#ifdef DFLASH_HAS_WGMMA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

__device__ __forceinline__ void WgmmaFence() {
#ifdef DFLASH_HAS_WGMMA
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void WgmmaCommit() {
#ifdef DFLASH_HAS_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Waits until at most `pending` committed groups still run.
template <int pending>
__device__ __forceinline__ void WgmmaWait() {
#ifdef DFLASH_HAS_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
#endif
}

// Run(d, a, b, accumulate): d = a b' when accumulate is 0, else d += a b'.
template <int N>
struct Wgmma;

// The same with a in registers, as pairs of bf16, and b stored with k as its rows: d += a b for b[16, N].
// a: in thread t of the warpgroup (warp w, lane l), a[i] is row 16 w + l / 4 + 8 (i mod 2), columns
// 8 (i / 2) + 2 (l mod 4) and the next: what rounding two neighbouring blocks of 8 columns of a d gives.
template <int N>
struct WgmmaRegisters;

// An instruction names every register of d, N / 2 of them: as %0, %1, ... in its text, and as operands behind it.
// clang-format off
#define DFLASH_NAMES_4 "%0,%1,%2,%3"
#define DFLASH_NAMES_8 DFLASH_NAMES_4 ",%4,%5,%6,%7"
#define DFLASH_NAMES_16 DFLASH_NAMES_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define DFLASH_NAMES_24 DFLASH_NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define DFLASH_NAMES_32 DFLASH_NAMES_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define DFLASH_NAMES_40 DFLASH_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define DFLASH_NAMES_48 DFLASH_NAMES_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define DFLASH_NAMES_56 DFLASH_NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define DFLASH_NAMES_64 DFLASH_NAMES_56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define DFLASH_NAMES_72 DFLASH_NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define DFLASH_NAMES_80 DFLASH_NAMES_72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define DFLASH_NAMES_88 DFLASH_NAMES_80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define DFLASH_NAMES_96 DFLASH_NAMES_88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define DFLASH_NAMES_104 DFLASH_NAMES_96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define DFLASH_NAMES_112 DFLASH_NAMES_104 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define DFLASH_NAMES_120 DFLASH_NAMES_112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define DFLASH_NAMES_128 DFLASH_NAMES_120 ",%120,%121,%122,%123,%124,%125,%126,%127"

#define DFLASH_FOUR_OPERANDS(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define DFLASH_EIGHT_OPERANDS(i) DFLASH_FOUR_OPERANDS(i), DFLASH_FOUR_OPERANDS(i + 4)
#define DFLASH_OPERANDS_4 DFLASH_FOUR_OPERANDS(0)
#define DFLASH_OPERANDS_8 DFLASH_EIGHT_OPERANDS(0)
#define DFLASH_OPERANDS_16 DFLASH_OPERANDS_8, DFLASH_EIGHT_OPERANDS(8)
#define DFLASH_OPERANDS_24 DFLASH_OPERANDS_16, DFLASH_EIGHT_OPERANDS(16)
#define DFLASH_OPERANDS_32 DFLASH_OPERANDS_24, DFLASH_EIGHT_OPERANDS(24)
#define DFLASH_OPERANDS_40 DFLASH_OPERANDS_32, DFLASH_EIGHT_OPERANDS(32)
#define DFLASH_OPERANDS_48 DFLASH_OPERANDS_40, DFLASH_EIGHT_OPERANDS(40)
#define DFLASH_OPERANDS_56 DFLASH_OPERANDS_48, DFLASH_EIGHT_OPERANDS(48)
#define DFLASH_OPERANDS_64 DFLASH_OPERANDS_56, DFLASH_EIGHT_OPERANDS(56)
#define DFLASH_OPERANDS_72 DFLASH_OPERANDS_64, DFLASH_EIGHT_OPERANDS(64)
#define DFLASH_OPERANDS_80 DFLASH_OPERANDS_72, DFLASH_EIGHT_OPERANDS(72)
#define DFLASH_OPERANDS_88 DFLASH_OPERANDS_80, DFLASH_EIGHT_OPERANDS(80)
#define DFLASH_OPERANDS_96 DFLASH_OPERANDS_88, DFLASH_EIGHT_OPERANDS(88)
#define DFLASH_OPERANDS_104 DFLASH_OPERANDS_96, DFLASH_EIGHT_OPERANDS(96)
#define DFLASH_OPERANDS_112 DFLASH_OPERANDS_104, DFLASH_EIGHT_OPERANDS(104)
#define DFLASH_OPERANDS_120 DFLASH_OPERANDS_112, DFLASH_EIGHT_OPERANDS(112)
#define DFLASH_OPERANDS_128 DFLASH_OPERANDS_120, DFLASH_EIGHT_OPERANDS(120)

#ifdef DFLASH_HAS_WGMMA
#define DFLASH_WGMMA_ASM(...) asm volatile(__VA_ARGS__)
#else
#define DFLASH_WGMMA_ASM(...) static_cast<void>(0)
#endif

// `count`: registers of d, and the number of the operand behind them: a, then b and accumulate.
#define DFLASH_WGMMA(n, count, b_number, accumulate_number)                                           \
  template <>                                                                                         \
  struct Wgmma<n> {                                                                                   \
    static_assert(count == n / 2 && b_number == count + 1 && accumulate_number == count + 2);         \
    static __device__ __forceinline__ void Run(float (&d)[count], uint64_t a, uint64_t b,             \
                                               int accumulate) {                                      \
      DFLASH_WGMMA_ASM(                                                                               \
          "{\n"                                                                                       \
          ".reg .pred p;\n"                                                                           \
          "setp.ne.b32 p, %" #accumulate_number ", 0;\n"                                              \
          "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" DFLASH_NAMES_##count           \
          "}, %" #count ", %" #b_number ", p, 1, 1, 0, 0;\n"                                          \
          "}"                                                                                         \
          : DFLASH_OPERANDS_##count                                                                   \
          : "l"(a), "l"(b), "r"(accumulate));                                                         \
    }                                                                                                 \
  };

DFLASH_WGMMA(8, 4, 5, 6)
DFLASH_WGMMA(16, 8, 9, 10)
DFLASH_WGMMA(32, 16, 17, 18)
DFLASH_WGMMA(48, 24, 25, 26)
DFLASH_WGMMA(64, 32, 33, 34)
DFLASH_WGMMA(80, 40, 41, 42)
DFLASH_WGMMA(96, 48, 49, 50)
DFLASH_WGMMA(112, 56, 57, 58)
DFLASH_WGMMA(128, 64, 65, 66)
DFLASH_WGMMA(160, 80, 81, 82)
DFLASH_WGMMA(192, 96, 97, 98)
DFLASH_WGMMA(224, 112, 113, 114)
DFLASH_WGMMA(256, 128, 129, 130)

#define DFLASH_WGMMA_REGISTERS(n, count, a1, a2, a3, b_number, accumulate_number)                     \
  template <>                                                                                         \
  struct WgmmaRegisters<n> {                                                                          \
    static_assert(count == n / 2 && a1 == count + 1 && a2 == count + 2 && a3 == count + 3);           \
    static_assert(b_number == count + 4 && accumulate_number == count + 5);                           \
    static __device__ __forceinline__ void Run(float (&d)[count], const uint32_t (&a)[4], uint64_t b, \
                                               int accumulate) {                                      \
      DFLASH_WGMMA_ASM(                                                                               \
          "{\n"                                                                                       \
          ".reg .pred p;\n"                                                                           \
          "setp.ne.b32 p, %" #accumulate_number ", 0;\n"                                              \
          "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" DFLASH_NAMES_##count           \
          "}, {%" #count ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b_number ", p, 1, 1, 1;\n"                \
          "}"                                                                                         \
          : DFLASH_OPERANDS_##count                                                                   \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                     \
    }                                                                                                 \
  };

DFLASH_WGMMA_REGISTERS(64, 32, 33, 34, 35, 36, 37)
DFLASH_WGMMA_REGISTERS(128, 64, 65, 66, 67, 68, 69)
DFLASH_WGMMA_REGISTERS(256, 128, 129, 130, 131, 132, 133)
// clang-format on

}  // namespace dflash::ptx
