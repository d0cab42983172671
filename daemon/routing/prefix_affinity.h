// Which group has probably cached the beginning of a prompt: remembers the prompts that each group got, in
// blocks of 64 tokens, the page of the groups' own caches. A guess for routing, never a promise: a group may
// have evicted what stands here. Pure bookkeeping.
#pragma once

#include <cstdint>
#include <list>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace dflash {

class PrefixAffinity {
 public:
  static constexpr int64_t kBlockTokens = 64;

  // Remembers at most this many blocks of a group, the latest used ones.
  explicit PrefixAffinity(size_t max_blocks = 1 << 14) : max_blocks_(max_blocks) {}

  // One hash for each whole block, of everything up to its end; prompts with different salts share nothing.
  static std::vector<uint64_t> BlockHashes(std::span<const int32_t> prompt, std::string_view salt);

  // `group` has got a prompt with these hashes.
  void Record(size_t group, std::span<const uint64_t> hashes);
  // Tokens at the beginning of such a prompt that the group has got before.
  int64_t Match(size_t group, std::span<const uint64_t> hashes) const;
  // The group has lost its caches.
  void Forget(size_t group);

 private:
  struct Blocks {
    std::list<uint64_t> by_use;  // the latest first
    std::unordered_map<uint64_t, std::list<uint64_t>::iterator> index;
  };

  const size_t max_blocks_;
  std::unordered_map<size_t, Blocks> groups_;
};

}  // namespace dflash
