// The prefix cache: what a request needs of a prompt's beginning that another one has already computed. All
// of it or nothing: the target's keys and values and the drafter's context, which share pages, and the
// recurrent states, of which there are checkpoints at some positions (docs/adr, "Cold equals warm").
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "worker/cache/prefix_index.h"
#include "worker/cache/sequence_table.h"
#include "worker/cache/state_checkpoint.h"

namespace dflash {

// Prompts that run at the same time may compute the same cells; each then has a page of its own for it, and
// the node has that of one of them, or a page that several share. So what is pinned takes no room beyond what
// its users hold.
//
// Decides, on the leader's engine thread, which pages and checkpoints hold what; it moves no data itself.
// What it says takes effect in the order of the stream, so pages and checkpoints may change hands at once.
class PrefixCache {
 public:
  struct Options {
    int64_t checkpoints = 0;  // of the target's pool, >= 1
    // Tokens that end a turn of a conversation (the system's message, a user's): states are kept at turns'
    // ends, since that is where other prompts branch off.
    std::vector<int32_t> turn_end_tokens;
  };
  // `table` is not owned; the cache holds references of its pages.
  PrefixCache(Options options, SequenceTable* table);
  ~PrefixCache();
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  // What is there for a prompt, in tokens: multiples of 64, less than the prompt, whose last token has to run
  // in any case.
  struct Hit {
    int64_t tokens = 0;        // to begin with: the least of the following
    int64_t page_tokens = 0;   // keys, values and drafter context
    int64_t state_tokens = 0;  // the last checkpoint among these
    int32_t checkpoint = -1;   // of `tokens`; -1: none, tokens = 0
    int64_t pinned_pages = 0;  // of `tokens`: such that other requests hold already
  };
  Hit Find(const std::string& salt, absl::Span<const int32_t> prompt) const;

  // A prompt begins in an empty slot, which gets the pages of what is there. The caller then copies the
  // checkpoint into the slot before any other work is enqueued. The prompt must live until Close.
  // Without `use_cached` it begins with nothing, though it leaves what it runs.
  absl::StatusOr<Hit> Open(int32_t slot, const std::string& salt, absl::Span<const int32_t> prompt,
                           bool use_cached = true);
  // The checkpoints that the forward over rows [first, last) of the slot's prompt shall make, in ascending
  // order; none for slots that were not opened here. Every one is answered by OnPrefilled.
  std::vector<StateCheckpoint> PlanCheckpoints(int32_t slot, int64_t first, int64_t last);
  // That forward has been enqueued, and the drafter's context goes as far: whole pages become visible to
  // other requests, `made` are the checkpoints in it.
  void OnPrefilled(int32_t slot, int64_t end, const std::vector<StateCheckpoint>& made);
  // Before the table's slot is closed. Does nothing for slots that were not opened here.
  void Close(int32_t slot);

  // Pages that MakeRoom can add to the free ones.
  int64_t evictable_pages() const { return index_.evictable(); }
  // How many pages more are free or evictable once the slot is closed.
  int64_t PagesAfter(int32_t slot) const;
  // Evicts until the table has `pages` free ones or nothing is left to evict.
  void MakeRoom(int64_t pages);
  // Evicts everything that nobody uses.
  void Clear();

  // Since the beginning: pages that others needed, and checkpoints, those that went with their page included.
  int64_t evicted_pages() const { return evicted_pages_; }
  int64_t evicted_checkpoints() const { return evicted_checkpoints_; }
  int64_t pages() const { return index_.size(); }
  int64_t used_checkpoints() const { return index_.checkpoints(); }
  int64_t checkpoints() const { return options_.checkpoints; }

 private:
  struct User {
    bool is_open = false;
    std::string salt;
    absl::Span<const int32_t> prompt;
    std::vector<int64_t> wanted;  // positions of checkpoints, ascending
    PrefixIndex::Node pinned = PrefixIndex::kNone;
  };
  void PinOnly(User& user, PrefixIndex::Node node);
  // The nodes of a user's prefix as far as they are pinned.
  std::vector<PrefixIndex::Node> PathOf(const User& user) const;
  void UsePage(PrefixIndex::Node node, int32_t page);
  // The slot leaves, and of the nodes that others use too, some have a page that it alone holds.
  void HandPagesOver(int32_t slot);
  bool EvictPage();

  const Options options_;
  SequenceTable* const table_;
  PrefixIndex index_;
  std::vector<User> users_;  // per slot
  std::vector<int32_t> free_checkpoints_;
  int64_t evicted_pages_ = 0, evicted_checkpoints_ = 0;
};

// Where states of a prompt are kept, beside the place where it leaves what is cached: at the ends of its
// first turn (the system's message and tools) and of its last one (the user's), and at its own end; all of
// them moved down to the grid, ascending.
std::vector<int64_t> CheckpointPositions(absl::Span<const int32_t> prompt,
                                         const std::vector<int32_t>& turn_end_tokens);

}  // namespace dflash
