// Finds added tokens in raw text: tokens that stand for a literal string and are split off before anything
// else looks at the text.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace dflash {

struct AddedToken {
  int32_t id;
  std::string content;  // not empty
  bool special;         // control token: Decode can leave it out
};

// Immutable, usable from many threads at once.
class AddedTokenMatcher {
 public:
  // Contents must be distinct and not empty.
  explicit AddedTokenMatcher(const std::vector<AddedToken>& tokens);

  struct Match {
    size_t begin, length;
    int32_t id;
  };
  // The first place at or behind `from` where a token stands in `text`; of those that begin there, the
  // longest. Time: O(text up to there * longest token) for any text.
  std::optional<Match> Find(std::string_view text, size_t from) const;

 private:
  static constexpr int32_t kNoToken = -1;
  std::array<bool, 256> first_bytes_{};
  absl::flat_hash_map<uint64_t, uint32_t> edges_;  // (node, byte) -> node of a trie; node 0 is the root
  std::vector<int32_t> ids_;                       // by node
};

}  // namespace dflash
