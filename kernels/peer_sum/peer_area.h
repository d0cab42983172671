// The layout of an exchange area: uint32 stop word, uint32 counters [max_rows], then rows of activations
// [2, max_rows, cols], each part aligned.
#pragma once

#include <cstdint>

namespace dflash {

inline constexpr int64_t kPeerAreaAlignment = 256;
inline constexpr int64_t kPeerCountersOffset = kPeerAreaAlignment;  // in bytes
constexpr int64_t PeerRowsOffset(int64_t max_rows) {
  return kPeerCountersOffset + (max_rows * int64_t{sizeof(uint32_t)} + kPeerAreaAlignment - 1) /
                                   kPeerAreaAlignment * kPeerAreaAlignment;
}

}  // namespace dflash
