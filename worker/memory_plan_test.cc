#include "worker/memory_plan.h"

#include <cmath>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/device/buffer.h"
#include "worker/load_group.h"

namespace dflash {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const std::string kSource = DFLASHD_SOURCE_DIR;

// Qwen3.6-27B and its drafter on one GPU.
MemoryDemand Real(int64_t sequences, int64_t cache_tokens) {
  MemoryDemand demand;
  demand.target = *TargetConfig::Load(kSource + "/tests/shapes/qwen3_6_27b");
  demand.drafter = *DraftConfig::Load(kSource + "/tests/shapes/qwen3_6_27b_dflash");
  demand.target_weight_bytes = 2 * int64_t{26895998464};
  demand.drafter_weight_bytes = 2 * int64_t{1730213120};
  demand.taps = 5;
  demand.sequences = sequences;
  demand.pages = (cache_tokens + 63) / 64;
  demand.block_rows = 16;
  return demand;
}

int64_t BytesOf(const MemoryPlan& plan, const std::string& begin) {
  for (const MemoryPool& pool : plan.pools) {
    if (pool.name.starts_with(begin)) return pool.bytes;
  }
  ADD_FAILURE() << begin;
  return 0;
}

// By hand, from the shapes (docs/spec/qwen3_5.md, docs/spec/dflash.md).
TEST(MemoryPlanTest, PoolsOfThe27B) {
  MemoryDemand demand = Real(3, 100000);
  demand.checkpoints = 5;
  const MemoryPlan plan = PlanMemory(demand);
  const int64_t tokens = 1563 * 64;
  EXPECT_EQ(BytesOf(plan, "target keys and values"), 65536 * tokens);
  EXPECT_EQ(BytesOf(plan, "drafter keys and values"), 20480 * tokens);
  EXPECT_EQ(BytesOf(plan, "recurrent states"), 3 * int64_t{150994944});  // one state per sequence
  EXPECT_EQ(BytesOf(plan, "convolution states"), 3 * int64_t{2949120});
  EXPECT_EQ(BytesOf(plan, "state checkpoints"), 5 * (int64_t{150994944} + 2949120));
  EXPECT_EQ(BytesOf(plan, "delta records") % (3 * 48 * 2 * 16 * 4), 0);
  EXPECT_LE(BytesOf(plan, "delta records"), 3 * 48 * 2 * 16 * 4 * int64_t{48 * 257});
}

TEST(MemoryPlanTest, The27BWithAHundredThousandTokensNeedsLessThan75GB) {
  EXPECT_LT(PlanMemory(Real(8, 100000)).total() + kMemoryReserve, int64_t{75} * 1000 * 1000 * 1000);
}

absl::Status FitsFree(const MemoryDemand& demand, int64_t free_bytes) {
  return CheckFits({demand}, {.bytes = free_bytes, .reserve = kMemoryReserve, .name = "free"});
}

TEST(MemoryPlanTest, SaysWhatWouldFit) {
  const MemoryDemand demand = Real(8, 500000);
  const int64_t needed = PlanMemory(demand).total() + kMemoryReserve;
  EXPECT_TRUE(FitsFree(demand, needed).ok());
  const absl::Status status = FitsFree(demand, needed - 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  // One page less, or one sequence less, and it fits.
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("--cache-tokens 499968)"), HasSubstr("--max-sequences 7)"),
                    HasSubstr("--max-prefill-tokens 511)"), Not(HasSubstr("--prefix-checkpoints"))));

  const absl::Status small = FitsFree(demand, int64_t{70} * 1000 * 1000 * 1000);
  EXPECT_THAT(std::string(small.message()),
              AllOf(HasSubstr("most of it for target weights (53.792 GB), 70.000 GB are free;"),
                    HasSubstr("--cache-tokens"), Not(HasSubstr("--max-sequences"))))
      << "not even one, with this cache";

  const absl::Status hopeless = FitsFree(demand, int64_t{40} * 1000 * 1000 * 1000);
  EXPECT_EQ(hopeless.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(hopeless.message()),
              AllOf(HasSubstr("the weights are 57.252 GB"), Not(HasSubstr("--"))));
}

TEST(MemoryPlanTest, NamesThePoolThatIsTooLargeAndItsFlag) {
  constexpr int64_t kHundred = int64_t{100} * 1000 * 1000 * 1000;
  EXPECT_THAT(std::string(FitsFree(Real(8, 100000000000), kHundred).message()),
              HasSubstr("most of it for target keys and values: 100000000000 tokens (6553600.000 GB; less "
                        "with --cache-tokens)"));
  MemoryDemand demand = Real(8, 1000);
  demand.checkpoints = 1000;
  const int64_t needed = PlanMemory(demand).total() + kMemoryReserve;
  EXPECT_THAT(
      std::string(FitsFree(demand, needed - 1).message()),
      AllOf(HasSubstr("most of it for state checkpoints of the prefix cache: 1000 (153.944 GB; less with "
                      "--prefix-checkpoints)"),
            HasSubstr("; 999 prefix checkpoints would fit (--prefix-checkpoints 999)")));
  demand.checkpoints = 0;
  demand.sequences = 1024;
  EXPECT_THAT(std::string(FitsFree(demand, kHundred).message()),
              AllOf(HasSubstr("recurrent states: 1024 sequences (154.619 GB; less with --max-sequences)"),
                    HasSubstr("sequences would fit (--max-sequences ")));
  demand = Real(50, 50 * 64000);  // fewer sequences make the cache smaller, too
  const int64_t fifty = PlanMemory(demand).total() + kMemoryReserve;
  demand = Real(100, 100 * 64000);
  demand.pages_of_sequence = 1000;
  EXPECT_THAT(
      std::string(FitsFree(demand, fifty).message()),
      AllOf(HasSubstr("less with --cache-tokens or --max-sequences"), HasSubstr("--max-sequences 50)")));
}

TEST(MemoryPlanTest, RanksThatShareAMemoryNeedTheSum) {
  const MemoryDemand leader = Real(8, 100000);
  MemoryDemand other = leader;
  other.drafter.reset();
  other.drafter_weight_bytes = 0;
  const int64_t needed = PlanMemory(leader).total() + PlanMemory(other).total();
  EXPECT_TRUE(CheckFits({leader, other}, {.bytes = needed, .name = "here"}).ok());
  const absl::Status status = CheckFits({leader, other}, {.bytes = needed - 1, .name = "here"});
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("target weights (107.584 GB)"), HasSubstr(" GB are here;"),
                    HasSubstr("--cache-tokens 99968)")));
}

TEST(MemoryPlanTest, PagesFillWhatIsLeft) {
  MemoryDemand demand = Real(8, 64);
  const int64_t bytes = int64_t{120} * 1000 * 1000 * 1000;
  demand.pages = PagesThatFit(demand, bytes);
  EXPECT_GT(demand.pages, 5000);
  EXPECT_TRUE(FitsFree(demand, bytes).ok());
  ++demand.pages;
  EXPECT_FALSE(FitsFree(demand, bytes).ok());
  EXPECT_EQ(PagesThatFit(demand, int64_t{40} * 1000 * 1000 * 1000), 0);
}

// What the plan says is what is allocated.
TEST(MemoryPlanTest, AgreesWithWhatIsAllocated) {
  for (const bool with_drafter : {true, false}) {
    for (const int64_t sequences : {1, 5}) {
      SCOPED_TRACE(testing::Message() << with_drafter << " " << sequences);
      GroupOptions options;
      options.model = kSource + "/models/tiny-qwen3.6";
      if (with_drafter) options.draft_model = kSource + "/models/tiny-qwen3.6-dflash";
      options.max_sequences = sequences;
      options.cache_tokens = 10000;
      options.max_prefill_tokens = 256;
      double planned = 0;
      const int64_t before = AllocatedDeviceBytes();
      const auto group = LoadGroup(options, [&](const std::string& line) {
        const size_t end = line.find("  in all");
        if (line.starts_with("memory: ") && end != std::string::npos) planned = std::stod(line.substr(8));
      });
      ASSERT_TRUE(group.ok()) << group.status();
      const double allocated = static_cast<double>(AllocatedDeviceBytes() - before) / 1e9;
      EXPECT_NEAR(planned, allocated, 0.02 * allocated + 0.0005);  // the line has three decimals
      EXPECT_GT(allocated, 0.03);
    }
  }
}

}  // namespace
}  // namespace dflash
