// Byte-pair encoding of one piece of text: starts from one token a byte and, as long as two neighbours have a
// merge, applies the merge of lowest rank, the leftmost one first (Sennrich et al., "Neural Machine
// Translation of Rare Words with Subword Units", section 3.2, over bytes).
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"

namespace dflash {

struct BytePairMerge {
  int32_t left, right;  // token ids
  int32_t result;       // the id of the token that both together are
};

// Immutable, usable from many threads at once.
class BytePairEncoder {
 public:
  // `byte_tokens`: the token of each byte. `merges`: by rank; ids >= 0.
  // Errors: InvalidArgument when a pair occurs twice.
  static absl::StatusOr<BytePairEncoder> Create(const std::array<int32_t, 256>& byte_tokens,
                                                const std::vector<BytePairMerge>& merges);

  // Memory that Encode needs, kept between calls; one a thread.
  struct Workspace {
    struct Symbol {
      int32_t token;
      uint32_t previous, next;  // neighbours
      uint32_t rank;            // of the merge with `next`
    };
    std::vector<Symbol> symbols;
    std::vector<uint64_t> queue;
  };

  // Appends the tokens of `piece` (less than 2^32 bytes) to `ids`, in O(n log n).
  void Encode(std::string_view piece, Workspace& workspace, std::vector<int32_t>& ids) const;

 private:
  BytePairEncoder() = default;
  uint32_t RankOf(int32_t left, int32_t right) const;

  std::array<int32_t, 256> byte_tokens_{};
  std::vector<int32_t> results_;  // by rank
  absl::flat_hash_map<uint64_t, uint32_t> ranks_;
};

}  // namespace dflash
