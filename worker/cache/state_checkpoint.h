// A copy of the recurrent and convolution states of one sequence, made in the middle of its prompt.
#pragma once

#include <cstdint>

namespace dflash {

struct StateCheckpoint {
  int64_t position = 0;  // tokens that the states cover; a multiple of 64
  int32_t index = -1;    // in the target's pool of checkpoints
  bool operator==(const StateCheckpoint&) const = default;
};

}  // namespace dflash
