// The layout of an exchange area: uint32 counters [max_rows], then rows of activations [2, max_rows, cols].
#pragma once

#include <cstdint>

namespace dflash {

inline constexpr int64_t kPeerAreaAlignment = 256;
// Bytes before the rows.
constexpr int64_t PeerCounterBytes(int64_t max_rows) {
  return (max_rows * int64_t{sizeof(uint32_t)} + kPeerAreaAlignment - 1) / kPeerAreaAlignment *
         kPeerAreaAlignment;
}

}  // namespace dflash
