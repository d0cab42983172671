#include "worker/cache/sequence_table.h"

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::ElementsAre;

class SequenceTableTest : public ::testing::Test {
 protected:
  void Make(int64_t slots, int64_t pages, int64_t max_tokens) {
    stream_ = Stream::Create({.threads = 1}).value();
    table_ =
        SequenceTable::Create({.slots = slots, .pages = pages, .max_tokens = max_tokens}, *stream_).value();
  }
  // The slot's row of the table on the device, as far as it holds pages.
  std::vector<int32_t> OnDevice(int32_t slot) {
    const PageTable table = table_->page_table();
    std::vector<int32_t> row(static_cast<size_t>(table.pages_per_slot));
    EXPECT_TRUE(CopyToHost(row.data(), table.pages + slot * table.pages_per_slot,
                           table.pages_per_slot * int64_t{sizeof(int32_t)}, *stream_)
                    .ok());
    row.erase(std::find(row.begin(), row.end(), -1), row.end());
    return row;
  }

  std::optional<Stream> stream_;
  std::optional<SequenceTable> table_;
};

TEST_F(SequenceTableTest, SharedPagesAreFreeWhenTheLastHolderLeaves) {
  Make(2, 6, 256);
  const int32_t first = table_->Open().value();
  ASSERT_EQ(table_->Reserve(first, 130), absl::OkStatus());
  EXPECT_THAT(OnDevice(first), ElementsAre(0, 1, 2));
  table_->Retain(1);
  const int32_t second = table_->Open().value();
  ASSERT_EQ(table_->Append(second, {0, 1}), absl::OkStatus());
  ASSERT_EQ(table_->Reserve(second, 200), absl::OkStatus());
  EXPECT_THAT(OnDevice(second), ElementsAre(0, 1, 3, 4));
  EXPECT_EQ(table_->free_pages(), 1);
  ASSERT_EQ(table_->Close(first), absl::OkStatus());
  EXPECT_THAT(OnDevice(first), ElementsAre());
  EXPECT_EQ(table_->free_pages(), 2) << "only page 2 had no other holder";
  ASSERT_EQ(table_->Close(second), absl::OkStatus());
  EXPECT_EQ(table_->free_pages(), 5);
  table_->Release(1);
  EXPECT_EQ(table_->free_pages(), 6);
}

TEST_F(SequenceTableTest, RefusesPagesThatThereAreNot) {
  Make(1, 4, 128);
  const int32_t slot = table_->Open().value();
  for (const std::vector<int32_t>& pages : {std::vector<int32_t>{0, 4}, {-1}, {0, 1, 2}}) {
    EXPECT_EQ(table_->Append(slot, pages).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(table_->free_pages(), 4);
  }
  EXPECT_EQ(table_->Reserve(slot, 129).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(table_->Reserve(slot, 128), absl::OkStatus());
}

// Every page's references are counted beside the table, through thousands of changes.
TEST_F(SequenceTableTest, CountsAgreeWithAModel) {
  constexpr int64_t kSlots = 5, kPages = 40;
  Make(kSlots, kPages, 64 * 12);
  std::mt19937 random(3);
  std::map<int32_t, std::vector<int32_t>> open;
  std::vector<int32_t> retained;
  for (int step = 0; step < 5000; ++step) {
    switch (random() % 4) {
      case 0: {
        const absl::StatusOr<int32_t> slot = table_->Open();
        ASSERT_EQ(slot.ok(), open.size() < kSlots);
        if (!slot.ok()) break;
        std::vector<int32_t>& pages = open[*slot];
        if (open.size() > 1) {  // a prefix of another one
          const std::vector<int32_t>& other = open.begin()->second;
          pages.assign(other.begin(), other.begin() + static_cast<int64_t>(random() % (other.size() + 1)));
          ASSERT_EQ(table_->Append(*slot, pages), absl::OkStatus());
        }
        const int64_t tokens = 1 + static_cast<int64_t>(random() % (64 * 12));
        const int64_t more = (tokens + 63) / 64 - static_cast<int64_t>(pages.size());
        const bool fits = more <= table_->free_pages();
        ASSERT_EQ(table_->Reserve(*slot, tokens).ok(), fits);
        pages = table_->pages_of(*slot);
        break;
      }
      case 1:
        if (open.empty()) break;
        ASSERT_EQ(table_->Close(open.begin()->first), absl::OkStatus());
        open.erase(open.begin());
        break;
      case 2:
        if (open.empty() || open.begin()->second.empty()) break;
        retained.push_back(open.begin()->second.back());
        table_->Retain(retained.back());
        break;
      default:
        if (retained.empty()) break;
        table_->Release(retained.back());
        retained.pop_back();
    }
    std::vector<bool> held(kPages);
    for (const auto& [slot, pages] : open) {
      EXPECT_EQ(OnDevice(slot), pages);
      for (int32_t page : pages) held[static_cast<size_t>(page)] = true;
    }
    for (int32_t page : retained) held[static_cast<size_t>(page)] = true;
    ASSERT_EQ(table_->free_pages(), std::count(held.begin(), held.end(), false)) << "step " << step;
  }
}

}  // namespace
}  // namespace dflash
