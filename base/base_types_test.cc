#include <cmath>
#include <limits>

#include "base/dtype.h"
#include "base/layer_index.h"
#include "base/matrix_view.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

TEST(LayerIndexTest, OutputOfLayerZeroIsTheFirstStateAfterTheEmbedding) {
  EXPECT_EQ(Number(OutputOf(LayerIndex{0})), 1);
  EXPECT_EQ(Number(OutputOf(LayerIndex{61})), 62);
}

TEST(Bf16Test, RoundsToNearestTiesToEven) {
  EXPECT_EQ(bf16(1.0f).bits, 0x3f80);
  EXPECT_EQ(bf16(std::bit_cast<float>(0x3f808000u)).bits, 0x3f80);  // tie: to even, down
  EXPECT_EQ(bf16(std::bit_cast<float>(0x3f818000u)).bits, 0x3f82);  // tie: to even, up
  EXPECT_EQ(bf16(std::bit_cast<float>(0x3f808001u)).bits, 0x3f81);
  EXPECT_EQ(bf16(-std::numeric_limits<float>::infinity()).bits, 0xff80);
  EXPECT_TRUE(std::isnan(static_cast<float>(bf16(std::bit_cast<float>(0x7f800001u)))));
}

TEST(MatrixViewTest, BlockKeepsTheStride) {
  float values[12] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  const MatrixView all(values, 3, 4);
  const MatrixView block = all.Block(1, 2, 2, 2);
  EXPECT_EQ(block.Row<float>(0)[0], 6);
  EXPECT_EQ(block.Row<float>(1)[1], 11);
  EXPECT_EQ(ConstMatrixView(all).Cols(3, 1).Row<float>(2)[0], 11);
}

}  // namespace
}  // namespace dflash
