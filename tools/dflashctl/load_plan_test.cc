#include "tools/dflashctl/load_plan.h"

#include <algorithm>
#include <cmath>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash::ctl {
namespace {

std::vector<int64_t> Draw(const char* text, int count) {
  const auto distribution = CountDistribution::Parse(text, 100'000);
  EXPECT_TRUE(distribution.ok()) << distribution.status();
  std::mt19937_64 random(7);
  std::vector<int64_t> drawn;
  for (int i = 0; i < count; ++i) drawn.push_back(distribution->Draw(random));
  std::sort(drawn.begin(), drawn.end());
  return drawn;
}
double Mean(const std::vector<int64_t>& values) {
  double sum = 0;
  for (int64_t value : values) sum += static_cast<double>(value);
  return sum / static_cast<double>(values.size());
}

TEST(CountDistribution, Shapes) {
  EXPECT_EQ(Draw("17", 3), (std::vector<int64_t>{17, 17, 17}));
  const auto uniform = Draw("uniform:3:6", 4000);
  EXPECT_EQ(uniform.front(), 3);
  EXPECT_EQ(uniform.back(), 6);
  EXPECT_NEAR(Mean(uniform), 4.5, 0.1);
  const auto exponential = Draw("exponential:100:100000", 20000);
  EXPECT_NEAR(Mean(exponential), 100, 3);
  EXPECT_NEAR(static_cast<double>(exponential[10000]), 100 * std::log(2), 3);
  const auto lognormal = Draw("lognormal:200:0.5:100000", 20000);
  EXPECT_NEAR(static_cast<double>(lognormal[10000]), 200, 5);
  EXPECT_NEAR(static_cast<double>(lognormal[16827]), 200 * std::exp(0.5), 8) << "one sigma";
  EXPECT_EQ(Draw("lognormal:200:5:300", 1000).back(), 300);
  EXPECT_EQ(Draw("exponential:1:10", 1000).front(), 1);
}

TEST(CountDistribution, NothingElseParses) {
  for (const char* text : {"",
                           "0",
                           "-1",
                           "1.5",
                           "x",
                           "100001",
                           "uniform",
                           "uniform:1",
                           "uniform:0:5",
                           "uniform:5:4",
                           "uniform:1:2:3",
                           "uniform:1.5:3",
                           "exponential:0:5",
                           "exponential:9:5",
                           "exponential:5:",
                           "lognormal:5:1",
                           "lognormal:5:-1:9",
                           "lognormal:5:nan:9",
                           "normal:5:9",
                           "7:",
                           ":7",
                           "uniform:1:inf",
                           "uniform:1:100001",
                           " 7"}) {
    EXPECT_FALSE(CountDistribution::Parse(text, 100'000).ok()) << text;
  }
}

TEST(PoissonArrivals, MeanAndSpreadOfTheGaps) {
  PoissonArrivals arrivals(50, 3);
  double last = 0, sum = 0, squares = 0;
  constexpr int kCount = 20000;
  for (int i = 0; i < kCount; ++i) {
    const double at = arrivals.Next(), gap = at - last;
    ASSERT_GT(gap, 0);
    sum += gap;
    squares += gap * gap;
    last = at;
  }
  const double mean = sum / kCount;
  EXPECT_NEAR(mean, 0.02, 0.0006);
  EXPECT_NEAR(std::sqrt(squares / kCount - mean * mean), 0.02, 0.001) << "exponential: deviation equals mean";
}

LoadShape Shape() {
  LoadShape shape;
  shape.prompt_tokens = *CountDistribution::Parse("uniform:5:20", 100);
  shape.output_tokens = *CountDistribution::Parse("uniform:1:9", 100);
  shape.vocabulary = 1000;
  return shape;
}

TEST(RequestMaker, ARequestIsAFunctionOfSeedAndIndex) {
  LoadShape shape = Shape();
  const RequestMaker one(shape, {}), same(shape, {});
  EXPECT_EQ(one.Make(5).SerializeAsString(), same.Make(5).SerializeAsString());
  EXPECT_NE(one.Make(5).SerializeAsString(), one.Make(6).SerializeAsString());
  shape.seed = 2;
  EXPECT_NE(RequestMaker(shape, {}).Make(5).tokens().SerializeAsString(),
            one.Make(5).tokens().SerializeAsString());
  for (uint64_t i = 0; i < 200; ++i) {
    const v1::GenerateRequest request = one.Make(i);
    EXPECT_GE(request.tokens().ids_size(), 5);
    EXPECT_LE(request.tokens().ids_size(), 20);
    EXPECT_LT(*std::max_element(request.tokens().ids().begin(), request.tokens().ids().end()), 1000u);
    EXPECT_GE(request.stopping().max_tokens(), 1u);
    EXPECT_LE(request.stopping().max_tokens(), 9u);
    EXPECT_EQ(request.sampling().seed(), i);
  }
}

TEST(RequestMaker, PrefixesAreShared) {
  LoadShape shape = Shape();
  shape.prefixes = 3;
  shape.prefix_tokens = 64;
  const RequestMaker maker(shape, {});
  std::vector<std::vector<uint32_t>> seen;
  for (uint64_t i = 0; i < 100; ++i) {
    const v1::GenerateRequest request = maker.Make(i);
    ASSERT_GE(request.tokens().ids_size(), 64 + 5);
    std::vector<uint32_t> prefix(request.tokens().ids().begin(), request.tokens().ids().begin() + 64);
    if (std::find(seen.begin(), seen.end(), prefix) == seen.end()) seen.push_back(prefix);
  }
  EXPECT_EQ(seen.size(), 3u);
}

TEST(RequestMaker, PromptsComeOutOfTextOrAsTheyAre) {
  LoadShape shape = Shape();
  for (uint32_t i = 0; i < 50; ++i) shape.text.push_back(i);
  const RequestMaker cut(shape, {});
  for (uint64_t i = 0; i < 50; ++i) {
    const auto ids = cut.Make(i).tokens().ids();
    for (int k = 1; k < ids.size(); ++k) EXPECT_EQ(ids[k], (ids[k - 1] + 1) % 50);
  }
  shape.whole = {{1, 2, 3}, {4}};
  v1::GenerateRequest base;
  base.mutable_sampling()->set_temperature(0.5f);
  const RequestMaker whole(shape, base);
  int first = 0;
  for (uint64_t i = 0; i < 100; ++i) {
    const v1::GenerateRequest request = whole.Make(i);
    EXPECT_EQ(request.sampling().temperature(), 0.5f);
    EXPECT_TRUE(request.tokens().ids_size() == 3 || request.tokens().ids_size() == 1);
    first += request.tokens().ids_size() == 3 ? 1 : 0;
  }
  EXPECT_GT(first, 30);
  EXPECT_LT(first, 70);
}

}  // namespace
}  // namespace dflash::ctl
