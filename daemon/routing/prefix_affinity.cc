#include "daemon/routing/prefix_affinity.h"

namespace dflash {
namespace {

// The finalizer of splitmix64: every bit of the result depends on every bit of x.
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

std::vector<uint64_t> PrefixAffinity::BlockHashes(std::span<const int32_t> prompt, std::string_view salt) {
  uint64_t hash = salt.size();
  for (const char c : salt) hash = Mix(hash + 0x9e3779b97f4a7c15u + static_cast<unsigned char>(c));
  std::vector<uint64_t> hashes;
  const size_t blocks = prompt.size() / kBlockTokens;
  hashes.reserve(blocks);
  for (size_t i = 0; i < blocks * kBlockTokens; ++i) {
    hash = Mix(hash + 0x9e3779b97f4a7c15u + static_cast<uint32_t>(prompt[i]));
    if ((i + 1) % kBlockTokens == 0) hashes.push_back(hash);
  }
  return hashes;
}

void PrefixAffinity::Record(size_t group, std::span<const uint64_t> hashes) {
  Blocks& blocks = groups_[group];
  // From the end: the beginning, which more prompts share, is then the latest used and goes last.
  for (size_t i = hashes.size(); i-- > 0;) {
    const auto known = blocks.index.find(hashes[i]);
    if (known != blocks.index.end()) {
      blocks.by_use.splice(blocks.by_use.begin(), blocks.by_use, known->second);
      continue;
    }
    blocks.by_use.push_front(hashes[i]);
    blocks.index.emplace(hashes[i], blocks.by_use.begin());
    if (blocks.index.size() > max_blocks_) {
      blocks.index.erase(blocks.by_use.back());
      blocks.by_use.pop_back();
    }
  }
}

int64_t PrefixAffinity::Match(size_t group, std::span<const uint64_t> hashes) const {
  const auto blocks = groups_.find(group);
  if (blocks == groups_.end()) return 0;
  int64_t matched = 0;
  for (const uint64_t hash : hashes) {
    if (blocks->second.index.count(hash) == 0) break;
    ++matched;
  }
  return matched * kBlockTokens;
}

void PrefixAffinity::Forget(size_t group) { groups_.erase(group); }

}  // namespace dflash
