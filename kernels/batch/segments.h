// How the rows of a step belong to sequences. Everything here lies in device memory, so that lengths may
// change on the device between the steps of a captured graph.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace dflash {

// Consecutive rows of one sequence: row first_row + i is the token at absolute position start_position + i,
// its parent is the row before it, the parent of row 0 is the sequence's committed state.
struct Segment {
  int32_t slot = 0;  // state slot of the sequence: row of page tables, recurrent and conv states
  int32_t first_row = 0;
  int32_t row_count = 0;
  int32_t start_position = 0;  // = committed length of the sequence
};

struct SegmentList {
  const Segment* data = nullptr;  // device memory
  int64_t count = 0;
};

// InvalidArgument, beginning with `operation`, for a list that cannot be read. What the segments say is not
// looked at: that is device memory.
inline absl::Status CheckSegmentList(const char* operation, SegmentList segments) {
  if (segments.count >= 0 && (segments.count == 0 || segments.data != nullptr)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(operation, ": no segments behind a count of ", segments.count));
}

// Tokens in one page of keys and values; also the grid of prefill chunks and of attention's key blocks.
inline constexpr int64_t kPageTokens = 64;

// pages[slot * pages_per_slot + i] is the page that holds positions [64 i, 64 i + 64) of the slot's sequence.
// One table serves the target's keys and values and the drafter's context.
struct PageTable {
  const int32_t* pages = nullptr;  // device memory
  int64_t slots = 0;
  int64_t pages_per_slot = 0;
};

}  // namespace dflash
