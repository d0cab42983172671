#include "text/added_tokens.h"

#include "base/check.h"

namespace dflash {
namespace {

uint64_t EdgeKey(uint32_t node, char byte) {
  return static_cast<uint64_t>(node) << 8 | static_cast<uint8_t>(byte);
}

}  // namespace

AddedTokenMatcher::AddedTokenMatcher(const std::vector<AddedToken>& tokens) {
  ids_.push_back(kNoToken);
  for (const AddedToken& token : tokens) {
    DFLASH_CHECK(!token.content.empty());
    first_bytes_[static_cast<uint8_t>(token.content[0])] = true;
    uint32_t node = 0;
    for (const char byte : token.content) {
      const auto [edge, fresh] = edges_.emplace(EdgeKey(node, byte), static_cast<uint32_t>(ids_.size()));
      if (fresh) ids_.push_back(kNoToken);
      node = edge->second;
    }
    DFLASH_CHECK(ids_[node] == kNoToken, "two added tokens have the same content");
    ids_[node] = token.id;
  }
}

std::optional<AddedTokenMatcher::Match> AddedTokenMatcher::Find(std::string_view text, size_t from) const {
  for (size_t begin = from; begin < text.size(); ++begin) {
    if (!first_bytes_[static_cast<uint8_t>(text[begin])]) continue;
    std::optional<Match> longest;
    uint32_t node = 0;
    for (size_t i = begin; i < text.size(); ++i) {
      const auto edge = edges_.find(EdgeKey(node, text[i]));
      if (edge == edges_.end()) break;
      node = edge->second;
      if (ids_[node] != kNoToken) longest = Match{begin, i + 1 - begin, ids_[node]};
    }
    if (longest) return longest;
  }
  return std::nullopt;
}

}  // namespace dflash
