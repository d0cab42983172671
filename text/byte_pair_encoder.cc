#include "text/byte_pair_encoder.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace dflash {
namespace {

constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

uint64_t Pack(uint32_t high, uint32_t low) { return static_cast<uint64_t>(high) << 32 | low; }

}  // namespace

absl::StatusOr<BytePairEncoder> BytePairEncoder::Create(const std::array<int32_t, 256>& byte_tokens,
                                                        const std::vector<BytePairMerge>& merges) {
  DFLASH_CHECK(merges.size() < kNone);
  BytePairEncoder encoder;
  encoder.byte_tokens_ = byte_tokens;
  encoder.results_.reserve(merges.size());
  encoder.ranks_.reserve(merges.size());
  for (const BytePairMerge& merge : merges) {
    const auto rank = static_cast<uint32_t>(encoder.results_.size());
    const uint64_t pair = Pack(static_cast<uint32_t>(merge.left), static_cast<uint32_t>(merge.right));
    if (!encoder.ranks_.emplace(pair, rank).second) {
      return absl::InvalidArgumentError(absl::StrCat("merges[", rank, "]: the pair occurs twice"));
    }
    encoder.results_.push_back(merge.result);
  }
  return encoder;
}

uint32_t BytePairEncoder::RankOf(int32_t left, int32_t right) const {
  const auto it = ranks_.find(Pack(static_cast<uint32_t>(left), static_cast<uint32_t>(right)));
  return it == ranks_.end() ? kNone : it->second;
}

void BytePairEncoder::Encode(std::string_view piece, Workspace& workspace, std::vector<int32_t>& ids) const {
  DFLASH_CHECK(piece.size() < kNone);
  const auto size = static_cast<uint32_t>(piece.size());
  if (size == 0) return;

  // A list of symbols in their places: the symbol at the leftmost byte of a token stands for it. The queue
  // holds (rank, place); an entry is stale when the rank at its place is another one by now.
  auto& symbols = workspace.symbols;
  auto& queue = workspace.queue;
  symbols.resize(size);
  queue.clear();
  for (uint32_t i = 0; i < size; ++i) {
    symbols[i] = {byte_tokens_[static_cast<uint8_t>(piece[i])], i == 0 ? kNone : i - 1,
                  i + 1 == size ? kNone : i + 1, kNone};
  }
  for (uint32_t i = 0; i + 1 < size; ++i) {
    symbols[i].rank = RankOf(symbols[i].token, symbols[i + 1].token);
    if (symbols[i].rank != kNone) queue.push_back(Pack(symbols[i].rank, i));
  }
  std::make_heap(queue.begin(), queue.end(), std::greater<>());

  const auto rank_again = [&](uint32_t i) {
    auto& symbol = symbols[i];
    symbol.rank = symbol.next == kNone ? kNone : RankOf(symbol.token, symbols[symbol.next].token);
    if (symbol.rank == kNone) return;
    queue.push_back(Pack(symbol.rank, i));
    std::push_heap(queue.begin(), queue.end(), std::greater<>());
  };
  while (!queue.empty()) {
    std::pop_heap(queue.begin(), queue.end(), std::greater<>());
    const auto rank = static_cast<uint32_t>(queue.back() >> 32);
    const auto i = static_cast<uint32_t>(queue.back());
    queue.pop_back();
    auto& left = symbols[i];
    if (left.rank != rank) continue;
    auto& right = symbols[left.next];
    left.token = results_[rank];
    left.next = right.next;
    right.rank = kNone;  // it is no more
    if (left.next != kNone) symbols[left.next].previous = i;
    rank_again(i);
    if (left.previous != kNone) rank_again(left.previous);
  }
  for (uint32_t i = 0; i != kNone; i = symbols[i].next) ids.push_back(symbols[i].token);
}

}  // namespace dflash
