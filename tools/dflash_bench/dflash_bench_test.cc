// What dflash-bench says about shapes and figures; how fast anything is, no test asks.
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tools/dflash_bench/linear_layers.h"
#include "tools/dflash_bench/report.h"
#include "tools/dflash_bench/sgemm.h"
#include "tools/dflash_bench/timing.h"

namespace dflash::bench {
namespace {

std::string SourcePath(const std::string& relative) {
  return std::string(DFLASHD_SOURCE_DIR) + "/" + relative;
}

int64_t Weights(const std::vector<LayerShape>& shapes) {
  int64_t weights = 0;
  for (const LayerShape& shape : shapes) weights += shape.count * shape.weights();
  return weights;
}

// Counted by hand from models/*/config.json: 6 Gated DeltaNet and 2 attention layers, 4 drafter layers.
TEST(LinearLayersTest, ShapesOfTheTinyPair) {
  const auto target = TargetConfig::Load(SourcePath("models/tiny-qwen3.6"));
  const auto draft = DraftConfig::Load(SourcePath("models/tiny-qwen3.6-dflash"));
  ASSERT_TRUE(target.ok() && draft.ok());
  const std::vector<LayerShape> shapes = TargetShapes(*target);
  EXPECT_EQ(shapes[0].out_features, 640 + 384 + 12 + 12);
  EXPECT_EQ(shapes[0].count, 6);
  EXPECT_EQ(Weights(shapes),
            6 * (1048 + 384) * 256 + 2 * (768 + 256) * 256 + 8 * (1024 + 512) * 256 + 4096 * 256);
  EXPECT_EQ(Weights(BlockPassShapes(*draft)), 4 * (384 + 256 + 384 + 1024 + 512) * 256);
  EXPECT_EQ(Weights(IngestionShapes(*draft)), 768 * 256 + 4 * 256 * 256);
  double operations = 0;
  for (const LayerCall& call : RoundCalls(*target, *draft, 10)) {
    operations += 2.0 * static_cast<double>(call.rows * call.shape.count * call.shape.weights());
  }
  EXPECT_EQ(operations, 2.0 * static_cast<double>(16 * (Weights(shapes) + Weights(BlockPassShapes(*draft))) +
                                                  15 * 4096 * 256 + 10 * Weights(IngestionShapes(*draft))));
}

TEST(SgemmTest, MultipliesByTheTransposedWeight) {
  if (SgemmLibrary().empty()) GTEST_SKIP() << "no library to compare with in this build";
  const std::vector<float> x = {1, 2, 3, 4, 5, 6}, w = {1, 0, 0, 0, 1, 1};
  std::vector<float> y(4);
  Sgemm(x.data(), w.data(), 2, 2, 3, y.data());
  EXPECT_EQ(y, (std::vector<float>{1, 5, 4, 11}));
}

TEST(TimingTest, MediansAndRatios) {
  EXPECT_EQ(Median({}), 0);
  EXPECT_EQ(Median({3}), 3);
  EXPECT_EQ(Median({9, 1, 5}), 5);
  EXPECT_EQ(MedianRatio({{2, 30, 8}}, {{1, 10, 2}}), 3);
}

TEST(ReportTest, JsonHoldsEveryFigure) {
  Report report;
  report.Fact("processor", "a \"quoted\" one");
  report.Section("first");
  report.Add({"row", {{"us", 1.5}, {"GB/s", 20}}});
  report.Section("second");
  const auto json = nlohmann::json::parse(report.Json());
  EXPECT_EQ(json.at("facts").at("processor"), "a \"quoted\" one");
  EXPECT_EQ(json.at("tables").at(0).at("rows").at(0).at("us"), 1.5);
  EXPECT_EQ(json.at("tables").at(0).at("rows").at(0).at("GB/s"), 20);
  EXPECT_TRUE(json.at("tables").at(1).at("rows").empty());
}

}  // namespace
}  // namespace dflash::bench
