#include "worker/cache/prefix_index.h"

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace dflash {
namespace {

using Tokens = std::vector<int32_t>;

// Cells named by one number each.
Tokens Cells(const std::vector<int32_t>& names, int64_t tail = 0) {
  Tokens tokens;
  for (int32_t name : names) {
    for (int32_t i = 0; i < kPageTokens; ++i) tokens.push_back(1000 * name + i);
  }
  tokens.resize(tokens.size() + static_cast<size_t>(tail), 7);
  return tokens;
}

std::vector<int32_t> PagesOf(const PrefixIndex& index, const std::vector<PrefixIndex::Node>& path) {
  std::vector<int32_t> pages;
  for (PrefixIndex::Node node : path) pages.push_back(index.page(node));
  return pages;
}

std::vector<int32_t> Find(const PrefixIndex& index, const std::string& salt, const Tokens& tokens) {
  return PagesOf(index, index.Find(salt, tokens));
}

TEST(PrefixIndex, FindsTheWholeCellsThatAreThere) {
  PrefixIndex index;
  EXPECT_EQ(index.Insert("", Cells({1, 2, 3}, 63), {10, 11, 12}).added, 3);
  EXPECT_EQ(index.Insert("", Cells({1, 2, 4}), {20, 21, 22}).added, 1);
  EXPECT_EQ(Find(index, "", Cells({1, 2, 3})), (std::vector<int32_t>{10, 11, 12}));
  EXPECT_EQ(Find(index, "", Cells({1, 2, 4, 5}, 1)), (std::vector<int32_t>{10, 11, 22}));
  EXPECT_EQ(Find(index, "", Cells({1, 5, 3})), (std::vector<int32_t>{10}));
  EXPECT_EQ(Find(index, "", Cells({2})), (std::vector<int32_t>{}));
  Tokens other = Cells({1, 2});
  other[127] ^= 1;
  EXPECT_EQ(Find(index, "", other), (std::vector<int32_t>{10})) << "the last token of a cell counts";
  other.resize(63);
  EXPECT_EQ(Find(index, "", other), (std::vector<int32_t>{}));
}

TEST(PrefixIndex, SaltsShareNothing) {
  PrefixIndex index;
  index.Insert("a", Cells({1}), {10});
  EXPECT_EQ(Find(index, "b", Cells({1})), (std::vector<int32_t>{}));
  EXPECT_EQ(Find(index, "", Cells({1})), (std::vector<int32_t>{}));
  EXPECT_EQ(index.Insert("b", Cells({1}), {11}).added, 1);
  EXPECT_EQ(Find(index, "a", Cells({1})), (std::vector<int32_t>{10}));
}

TEST(PrefixIndex, PinnedPathsStay) {
  PrefixIndex index;
  const auto path = index.Insert("", Cells({1, 2, 3}), {10, 11, 12}).path;
  index.SetCheckpoint(path[2], 5);
  index.Pin(path[1]);
  EXPECT_EQ(index.evictable(), 1);
  const auto evicted = index.EvictPage();
  ASSERT_TRUE(evicted.has_value());
  EXPECT_EQ(evicted->page, 12);
  EXPECT_EQ(evicted->checkpoint, 5) << "a checkpoint goes with its page";
  EXPECT_FALSE(index.EvictPage().has_value());
  EXPECT_FALSE(index.EvictCheckpoint().has_value());
  index.Unpin(path[1]);
  EXPECT_EQ(index.EvictPage()->page, 11);
  EXPECT_EQ(index.EvictPage()->page, 10);
  EXPECT_EQ(index.size(), 0);
}

TEST(PrefixIndex, CheckpointsHaveAnOrderOfTheirOwn) {
  PrefixIndex index;
  const auto a = index.Insert("", Cells({1, 2}), {10, 11}).path;
  const auto b = index.Insert("", Cells({3}), {12}).path;
  index.SetCheckpoint(a[0], 0);
  index.SetCheckpoint(a[1], 1);
  index.SetCheckpoint(b[0], 2);
  index.TouchCheckpoint(a[0]);
  index.Pin(a[1]);  // keeps pages, not checkpoints
  EXPECT_EQ(index.EvictCheckpoint(), 1);
  EXPECT_EQ(index.EvictCheckpoint(), 2);
  EXPECT_EQ(index.EvictCheckpoint(), 0);
  EXPECT_EQ(index.checkpoint(a[0]), -1);
  EXPECT_EQ(index.size(), 3);
}

// The same operations on a map from whole prefixes to what is known about them.
class Model {
 public:
  struct Entry {
    int32_t page = -1, checkpoint = -1;
    int pins = 0;
    uint64_t used = 0, checkpoint_used = 0;
  };
  using Prefix = std::pair<std::string, Tokens>;

  static Prefix Cut(const std::string& salt, const Tokens& tokens, size_t cells) {
    return {salt, Tokens(tokens.begin(), tokens.begin() + static_cast<int64_t>(cells) * kPageTokens)};
  }
  std::vector<Prefix> Find(const std::string& salt, const Tokens& tokens) const {
    std::vector<Prefix> path;
    for (size_t cells = 1; cells <= tokens.size() / kPageTokens; ++cells) {
      Prefix prefix = Cut(salt, tokens, cells);
      if (!entries.contains(prefix)) break;
      path.push_back(std::move(prefix));
    }
    return path;
  }
  void Insert(const std::string& salt, const Tokens& tokens, const std::vector<int32_t>& pages) {
    for (size_t cells = Find(salt, tokens).size() + 1; cells <= tokens.size() / kPageTokens; ++cells)
      entries[Cut(salt, tokens, cells)] = {.page = pages[cells - 1], .used = ++clock};
  }
  void Pin(const std::string& salt, const Tokens& tokens, size_t cells, int count) {
    ++clock;
    for (size_t i = 1; i <= cells; ++i) {
      Entry& entry = entries.at(Cut(salt, tokens, i));
      entry.pins += count;
      entry.used = clock;
    }
  }
  bool HasChild(const Prefix& prefix) const {
    return std::any_of(entries.begin(), entries.end(), [&](const auto& other) {
      return other.first.first == prefix.first && other.first.second.size() > prefix.second.size() &&
             std::equal(prefix.second.begin(), prefix.second.end(), other.first.second.begin());
    });
  }
  int64_t Evictable() const {
    return std::count_if(entries.begin(), entries.end(), [](const auto& e) { return e.second.pins == 0; });
  }
  const Prefix* LeastUsedLeaf() const {
    const std::pair<const Prefix, Entry>* best = nullptr;
    for (const auto& entry : entries) {
      if (entry.second.pins > 0 || HasChild(entry.first)) continue;
      if (best == nullptr || entry.second.used < best->second.used) best = &entry;
    }
    return best == nullptr ? nullptr : &best->first;
  }
  std::pair<const Prefix, Entry>* LeastUsedCheckpoint() {
    std::pair<const Prefix, Entry>* best = nullptr;
    for (auto& entry : entries) {
      if (entry.second.checkpoint < 0) continue;
      if (best == nullptr || entry.second.checkpoint_used < best->second.checkpoint_used) best = &entry;
    }
    return best;
  }

  std::map<Prefix, Entry> entries;
  uint64_t clock = 0;
};

TEST(PrefixIndex, AgreesWithAMapThroughRandomUse) {
  std::mt19937 random(11);
  PrefixIndex index;
  Model model;
  struct Use {
    std::string salt;
    Tokens tokens;
    size_t cells;
  };
  std::vector<Use> uses;
  int32_t next_page = 0, next_checkpoint = 0;
  int64_t evicted_pages = 0, evicted_checkpoints = 0, hits = 0;
  for (int step = 0; step < 6000; ++step) {
    SCOPED_TRACE(step);
    const std::string salt = random() % 4 == 0 ? "tenant" : "";
    std::vector<int32_t> names(1 + random() % 5);
    for (int32_t& name : names) name = static_cast<int32_t>(random() % 3);
    const Tokens tokens = Cells(names, random() % 64);
    switch (random() % 8) {
      case 0:
      case 1: {
        std::vector<int32_t> pages(names.size());
        for (int32_t& page : pages) page = next_page++;
        const auto before = model.entries.size();
        const auto inserted = index.Insert(salt, tokens, pages);
        model.Insert(salt, tokens, pages);
        ASSERT_EQ(inserted.added, static_cast<int64_t>(model.entries.size() - before));
        ASSERT_EQ(inserted.path.size(), names.size());
        break;
      }
      case 2: {
        const auto path = index.Find(salt, tokens);
        if (path.empty()) break;
        const size_t cells = 1 + random() % path.size();
        index.Pin(path[cells - 1]);
        model.Pin(salt, tokens, cells, 1);
        uses.push_back({salt, tokens, cells});
        break;
      }
      case 3: {
        if (uses.empty()) break;
        std::swap(uses[random() % uses.size()], uses.back());
        const Use use = uses.back();
        uses.pop_back();
        index.Unpin(index.Find(use.salt, use.tokens)[use.cells - 1]);
        model.Pin(use.salt, use.tokens, use.cells, -1);
        break;
      }
      case 4: {
        const auto path = index.Find(salt, tokens);
        if (path.empty()) break;
        Model::Entry& entry = model.entries.at(Model::Cut(salt, tokens, path.size()));
        if (entry.checkpoint < 0) {
          entry.checkpoint = next_checkpoint;
          index.SetCheckpoint(path.back(), next_checkpoint++);
        } else {
          index.TouchCheckpoint(path.back());
        }
        entry.checkpoint_used = ++model.clock;
        break;
      }
      case 5: {
        if (random() % 2 == 0) break;
        const auto evicted = index.EvictPage();
        const Model::Prefix* expected = model.LeastUsedLeaf();
        ASSERT_EQ(evicted.has_value(), expected != nullptr);
        if (expected == nullptr) break;
        ASSERT_EQ(evicted->page, model.entries.at(*expected).page);
        ASSERT_EQ(evicted->checkpoint, model.entries.at(*expected).checkpoint);
        model.entries.erase(Model::Prefix(*expected));
        ++evicted_pages;
        break;
      }
      case 6: {
        if (random() % 4 != 0) break;
        const auto evicted = index.EvictCheckpoint();
        auto* expected = model.LeastUsedCheckpoint();
        ASSERT_EQ(evicted.has_value(), expected != nullptr);
        if (expected == nullptr) break;
        ASSERT_EQ(*evicted, expected->second.checkpoint);
        expected->second.checkpoint = -1;
        ++evicted_checkpoints;
        break;
      }
      default: {
        const auto path = index.Find(salt, tokens);
        const auto expected = model.Find(salt, tokens);
        ASSERT_EQ(path.size(), expected.size());
        hits += !path.empty();
        for (size_t i = 0; i < path.size(); ++i) {
          ASSERT_EQ(index.page(path[i]), model.entries.at(expected[i]).page);
          ASSERT_EQ(index.checkpoint(path[i]), model.entries.at(expected[i]).checkpoint);
        }
      }
    }
    ASSERT_EQ(index.size(), static_cast<int64_t>(model.entries.size()));
    ASSERT_EQ(index.evictable(), model.Evictable());
  }
  EXPECT_GT(evicted_pages, 100);
  EXPECT_GT(evicted_checkpoints, 20);
  EXPECT_GT(hits, 100);
  for (const Use& use : uses) index.Unpin(index.Find(use.salt, use.tokens)[use.cells - 1]);
  while (index.EvictPage()) {
  }
  EXPECT_EQ(index.size(), 0);
  EXPECT_EQ(index.checkpoints(), 0);
}

}  // namespace
}  // namespace dflash
