#include "worker/cache/prefix_cache.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/check.h"
#include "base/status.h"

namespace dflash {
namespace {

int64_t OnGrid(int64_t tokens) { return tokens / kPageTokens * kPageTokens; }

// What another prompt with these tokens could begin with: its last token has to run.
absl::Span<const int32_t> Reusable(absl::Span<const int32_t> prompt) {
  return prompt.empty() ? prompt : prompt.first(prompt.size() - 1);
}

}  // namespace

std::vector<int64_t> CheckpointPositions(absl::Span<const int32_t> prompt,
                                         const std::vector<int32_t>& turn_end_tokens) {
  const auto ends_turn = [&](int32_t token) {
    return std::find(turn_end_tokens.begin(), turn_end_tokens.end(), token) != turn_end_tokens.end();
  };
  const auto size = static_cast<int64_t>(prompt.size());
  // A longer prompt can begin with all of this one; the same prompt has to leave its last token.
  std::set<int64_t> positions = {OnGrid(size), OnGrid(size - 1)};
  const auto first = std::find_if(prompt.begin(), prompt.end(), ends_turn);
  if (first != prompt.end()) {
    positions.insert(OnGrid(first - prompt.begin() + 1));
    const auto last = std::find_if(prompt.rbegin(), prompt.rend(), ends_turn);
    positions.insert(OnGrid(prompt.rend() - last));
  }
  positions.erase(0);
  return {positions.begin(), positions.end()};
}

PrefixCache::PrefixCache(Options options, SequenceTable* table)
    : options_(std::move(options)), table_(table), users_(static_cast<size_t>(table->slots())) {
  for (int64_t index = options_.checkpoints - 1; index >= 0; --index)
    free_checkpoints_.push_back(static_cast<int32_t>(index));
}

PrefixCache::~PrefixCache() {
  for (int32_t slot = 0; slot < table_->slots(); ++slot) Close(slot);
  Clear();
}

PrefixCache::Hit PrefixCache::Find(const std::string& salt, absl::Span<const int32_t> prompt) const {
  const std::vector<PrefixIndex::Node> path = index_.Find(salt, Reusable(prompt));
  Hit hit;
  hit.page_tokens = static_cast<int64_t>(path.size()) * kPageTokens;
  size_t cells = path.size();
  while (cells > 0 && index_.checkpoint(path[cells - 1]) < 0) --cells;
  hit.state_tokens = static_cast<int64_t>(cells) * kPageTokens;
  hit.tokens = std::min(hit.page_tokens, hit.state_tokens);
  if (cells == 0) return hit;
  hit.checkpoint = index_.checkpoint(path[cells - 1]);
  for (size_t cell = 0; cell < cells; ++cell) hit.pinned_pages += index_.pins(path[cell]) > 0;
  return hit;
}

absl::StatusOr<PrefixCache::Hit> PrefixCache::Open(int32_t slot, const std::string& salt,
                                                   absl::Span<const int32_t> prompt, bool use_cached) {
  User& user = users_[static_cast<size_t>(slot)];
  DFLASH_CHECK(!user.is_open, "slot opened twice");
  Hit hit = Find(salt, prompt);
  if (!use_cached) hit = {.page_tokens = hit.page_tokens, .state_tokens = hit.state_tokens};
  if (hit.tokens > 0) {
    const auto path = index_.Find(salt, prompt.first(static_cast<size_t>(hit.tokens)));
    std::vector<int32_t> pages;
    for (PrefixIndex::Node node : path) pages.push_back(index_.page(node));
    DFLASH_RETURN_IF_ERROR(table_->Append(slot, pages));
    index_.TouchCheckpoint(path.back());
    PinOnly(user, path.back());
  }
  std::vector<int64_t> positions = CheckpointPositions(prompt, options_.turn_end_tokens);
  // Where this prompt leaves the cached ones, others will too.
  positions.push_back(hit.page_tokens);
  std::sort(positions.begin(), positions.end());
  positions.erase(std::unique(positions.begin(), positions.end()), positions.end());
  std::erase_if(positions, [&](int64_t position) { return position <= hit.tokens; });
  user.is_open = true;
  user.salt = salt;
  user.prompt = prompt;
  user.wanted = std::move(positions);
  return hit;
}

std::vector<StateCheckpoint> PrefixCache::PlanCheckpoints(int32_t slot, int64_t first, int64_t last) {
  std::vector<StateCheckpoint> planned;
  const User& user = users_[static_cast<size_t>(slot)];
  for (int64_t position : user.wanted) {
    if (position <= first || position > last) continue;
    const auto path = index_.Find(user.salt, user.prompt.first(static_cast<size_t>(position)));
    const bool is_there =
        static_cast<int64_t>(path.size()) * kPageTokens == position && index_.checkpoint(path.back()) >= 0;
    if (is_there) continue;  // another request has been faster
    if (free_checkpoints_.empty()) {
      const std::optional<int32_t> evicted = index_.EvictCheckpoint();
      if (!evicted) break;  // all of them are being made in this step
      ++evicted_checkpoints_;
      free_checkpoints_.push_back(*evicted);
    }
    planned.push_back({.position = position, .index = free_checkpoints_.back()});
    free_checkpoints_.pop_back();
  }
  return planned;
}

void PrefixCache::OnPrefilled(int32_t slot, int64_t end, const std::vector<StateCheckpoint>& made) {
  User& user = users_[static_cast<size_t>(slot)];
  if (!user.is_open) return;
  const int64_t tokens = OnGrid(end);
  const PrefixIndex::Inserted inserted =
      index_.Insert(user.salt, user.prompt.first(static_cast<size_t>(tokens)), table_->pages_of(slot));
  const size_t first_new = inserted.path.size() - static_cast<size_t>(inserted.added);
  for (size_t cell = 0; cell < inserted.path.size(); ++cell) {
    const PrefixIndex::Node node = inserted.path[cell];
    if (cell >= first_new) {
      table_->Retain(index_.page(node));
    } else if (index_.pins(node) == 0) {
      // It has been there, but not its states, so that it was computed again.
      UsePage(node, table_->pages_of(slot)[cell]);
    }
  }
  if (!inserted.path.empty()) PinOnly(user, inserted.path.back());
  for (const StateCheckpoint& checkpoint : made) {
    const PrefixIndex::Node node = inserted.path[static_cast<size_t>(checkpoint.position / kPageTokens) - 1];
    if (index_.checkpoint(node) < 0) {
      index_.SetCheckpoint(node, checkpoint.index);
    } else {  // made twice in one step
      free_checkpoints_.push_back(checkpoint.index);
    }
  }
}

void PrefixCache::PinOnly(User& user, PrefixIndex::Node node) {
  index_.Pin(node);
  if (user.pinned != PrefixIndex::kNone) index_.Unpin(user.pinned);
  user.pinned = node;
}

std::vector<PrefixIndex::Node> PrefixCache::PathOf(const User& user) const {
  std::vector<PrefixIndex::Node> path;
  for (PrefixIndex::Node node = user.pinned; node != PrefixIndex::kNone; node = index_.parent(node))
    path.push_back(node);
  std::reverse(path.begin(), path.end());
  return path;
}

void PrefixCache::UsePage(PrefixIndex::Node node, int32_t page) {
  table_->Retain(page);
  table_->Release(index_.page(node));
  index_.SetPage(node, page);
}

void PrefixCache::Close(int32_t slot) {
  User& user = users_[static_cast<size_t>(slot)];
  if (user.pinned != PrefixIndex::kNone) {
    HandPagesOver(slot);
    index_.Unpin(user.pinned);
  }
  user = {};
}

void PrefixCache::HandPagesOver(int32_t slot) {
  const std::vector<int32_t>& pages = table_->pages_of(slot);
  const std::vector<PrefixIndex::Node> path = PathOf(users_[static_cast<size_t>(slot)]);
  for (int32_t other = 0; other < table_->slots(); ++other) {
    if (other == slot) continue;
    const std::vector<PrefixIndex::Node> others = PathOf(users_[static_cast<size_t>(other)]);
    for (size_t cell = 0; cell < std::min(path.size(), others.size()) && path[cell] == others[cell]; ++cell) {
      // Two hold it: the slot and this cache.
      if (index_.page(path[cell]) == pages[cell] && table_->references(pages[cell]) == 2)
        UsePage(path[cell], table_->pages_of(other)[cell]);
    }
  }
}

int64_t PrefixCache::PagesAfter(int32_t slot) const {
  const std::vector<int32_t>& pages = table_->pages_of(slot);
  auto count = static_cast<int64_t>(pages.size());
  const std::vector<PrefixIndex::Node> path = PathOf(users_[static_cast<size_t>(slot)]);
  for (size_t cell = 0; cell < path.size(); ++cell) {
    // Those stay that another slot holds too.
    count -= index_.page(path[cell]) == pages[cell] && table_->references(pages[cell]) > 2;
  }
  return count;
}

bool PrefixCache::EvictPage() {
  const std::optional<PrefixIndex::Evicted> evicted = index_.EvictPage();
  if (!evicted) return false;
  table_->Release(evicted->page);
  ++evicted_pages_;
  if (evicted->checkpoint < 0) return true;
  ++evicted_checkpoints_;
  free_checkpoints_.push_back(evicted->checkpoint);
  return true;
}

// A page that a slot holds too (it computed what was there already) does not become free by this: its slot
// has the path pinned, though, so such pages are not evicted before it is closed.
void PrefixCache::MakeRoom(int64_t pages) {
  while (table_->free_pages() < pages && EvictPage()) {
  }
}

void PrefixCache::Clear() {
  while (EvictPage()) {
  }
}

}  // namespace dflash
