// A row's phase is a field of the batch and decides its arithmetic everywhere, on every backend. It is never
// derived from the shape: a prefill chunk of 16 rows is not a verification of 16 rows (docs/ARCHITECTURE.md,
// "Exactness").
#pragma once

#include <cstdint>

namespace dflash {

enum class Phase : uint8_t {
  kPrefill,  // prompt tokens, in chunks on the global 64-token grid
  kVerify,   // an anchor and its drafts; also plain decoding (an anchor alone) and tokens fed again after a
             // resume
};

}  // namespace dflash
