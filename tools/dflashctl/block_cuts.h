// Blocks that were shorter than the drafter's: a row limit of the server (--max-verify-rows), or an
// operator's limit on drafts. What they give is not to be compared with what whole ones gave.
#pragma once

#include <cstdint>
#include <string>

#include "tools/dflashctl/connection.h"

namespace dflash::ctl {

class BlockCuts {
 public:
  // `block_rows`: of a whole block, anchor included.
  explicit BlockCuts(int64_t block_rows) : block_rows_(block_rows) {}

  // Adds the rounds of an answer to a request for at most `max_tokens` tokens. Returns whether one was cut:
  // it had fewer drafts than the block and the tokens that were left have room for.
  bool Add(const Generation& generation, int64_t max_tokens);

  bool any() const { return longest_ > 0; }
  // "blocks were cut to 8 of 16 rows (--max-verify-rows, or a limit on drafts)". Requires any().
  std::string Describe() const;

 private:
  const int64_t block_rows_;
  int64_t shortest_ = 0, longest_ = 0;  // rows of those that were cut
};

}  // namespace dflash::ctl
