#include "tools/dflashctl/block_cuts.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace dflash::ctl {

bool BlockCuts::Add(const Generation& generation, int64_t max_tokens) {
  bool cut = false;
  for (const v1::StepInfo& round : generation.rounds) {
    // The last row emits a token of the target's own.
    const int64_t room = max_tokens - int64_t{round.first_token_offset()} - 1;
    const int64_t rows = int64_t{round.drafted()} + 1;
    if (rows >= std::min(block_rows_, room + 1)) continue;
    shortest_ = any() ? std::min(shortest_, rows) : rows;
    longest_ = std::max(longest_, rows);
    cut = true;
  }
  return cut;
}

std::string BlockCuts::Describe() const {
  return absl::StrCat("blocks were cut to ",
                      shortest_ == longest_ ? std::string() : absl::StrCat(shortest_, " to "), longest_,
                      " of ", block_rows_, " rows (--max-verify-rows, or a limit on drafts)");
}

}  // namespace dflash::ctl
