// Both layouts of the residual over ranks as threads: equal bits on every rank and in every layout, those of
// sums in the order of ranks.
#include "worker/model/residual_stream.h"

#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/device/buffer.h"
#include "kernels/testing/host_matrix.h"
#include "worker/comm/host_communicator.h"

namespace dflash {
namespace {

constexpr int64_t kCols = 24;
constexpr float kEps = 1e-6f;

HostMatrix<float> Term(int rank, int64_t rows, uint64_t seed) {
  return RandomMatrix<float>(rows, kCols, seed * 100 + static_cast<uint64_t>(rank));
}

// Sum of the ranks' terms in the order of ranks, added to `h`.
HostMatrix<float> Added(const HostMatrix<float>& h, int ranks, uint64_t seed) {
  HostMatrix<float> sum = Term(0, h.rows, seed);
  for (int rank = 1; rank < ranks; ++rank) {
    const HostMatrix<float> term = Term(rank, h.rows, seed);
    for (size_t i = 0; i < sum.values.size(); ++i) sum.values[i] += term.values[i];
  }
  for (size_t i = 0; i < sum.values.size(); ++i) sum.values[i] += h.values[i];
  return sum;
}

struct RankResult {
  HostMatrix<float> normed{0, 0};  // after two products, all rows
  HostMatrix<float> taps{0,
                         0};  // the residual after the first product, all rows, in the second tap's columns
  int64_t own_rows = 0;
};

HostMatrix<float> ToHost(ConstMatrixView view) {
  HostMatrix<float> host(view.rows, view.cols);
  for (int64_t r = 0; r < view.rows; ++r)
    std::copy_n(view.Row<float>(r), view.cols, &host.values[static_cast<size_t>(r * view.cols)]);
  return host;
}

void Fill(MatrixView view, const HostMatrix<float>& values) {
  for (int64_t r = 0; r < view.rows; ++r)
    std::copy_n(&values.values[static_cast<size_t>(r * view.cols)], view.cols, view.Row<float>(r));
}

absl::StatusOr<RankResult> Work(Communicator* communicator, ResidualLayout layout, int64_t rows) {
  const Stream stream = Stream::Create({.threads = 1}).value();
  const int64_t padded = ResidualStream::PaddedRows(rows, communicator->size());
  Matrix hidden = Matrix::Allocate(padded, kCols, DType::kF32, stream).value();
  Matrix normed = Matrix::Allocate(padded, kCols, DType::kF32, stream).value();
  Matrix product = Matrix::Allocate(padded, kCols, DType::kF32, stream).value();
  Matrix taps = Matrix::Allocate(padded, 2 * kCols, DType::kF32, stream).value();
  Matrix weight = Matrix::Allocate(1, kCols, DType::kF32, stream).value();
  Fill(weight.view(), RandomMatrix<float>(1, kCols, 5));
  ResidualStream residual(communicator, layout, rows,
                          {.hidden = hidden.view(), .normed = normed.view(), .product = product.view()}, kEps,
                          stream);
  const int rank = communicator->rank();
  Fill(residual.embedding(), Term(rank, rows, 1));
  absl::Status status = residual.Begin();
  if (status.ok()) status = residual.Norm(weight.view());
  Fill(residual.product(), Term(rank, rows, 2));
  if (status.ok()) status = residual.AddNorm(weight.view());
  const MatrixView own = residual.own_rows();
  Fill(taps.view().Block(residual.first_row(), own.rows, kCols, kCols), ToHost(own));
  if (status.ok()) status = residual.GatherTaps(taps.view());
  Fill(residual.product(), Term(rank, rows, 3));
  if (status.ok()) status = residual.AddNorm(weight.view());
  if (!status.ok()) return status;
  return RankResult{.normed = ToHost(residual.normed()),
                    .taps = ToHost(taps.view().Block(0, rows, kCols, kCols)),
                    .own_rows = own.rows};
}

std::vector<RankResult> RunRanks(int ranks, ResidualLayout layout, int64_t rows) {
  auto communicators = HostCommunicator::CreateGroup({.size = ranks}).value();
  std::vector<RankResult> results(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < results.size(); ++rank) {
    threads.emplace_back([&, rank] {
      absl::StatusOr<RankResult> result = Work(communicators[rank].get(), layout, rows);
      EXPECT_TRUE(result.ok()) << result.status();
      if (result.ok()) results[rank] = *std::move(result);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

TEST(ResidualStreamTest, BothLayoutsSumInTheOrderOfRanks) {
  for (int ranks : {1, 2, 4, 8}) {
    for (int64_t rows : {1, 7, 16, 65}) {
      SCOPED_TRACE(::testing::Message() << ranks << " ranks, " << rows << " rows");
      const HostMatrix<float> after_embedding = Added(HostMatrix<float>(rows, kCols), ranks, 1);
      const HostMatrix<float> tapped = Added(after_embedding, ranks, 2);
      const std::vector<RankResult> replicated = RunRanks(ranks, ResidualLayout::kReplicated, rows);
      const std::vector<RankResult> sharded = RunRanks(ranks, ResidualLayout::kSharded, rows);
      int64_t own_rows = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        SCOPED_TRACE(rank);
        const auto at = static_cast<size_t>(rank);
        EXPECT_EQ(replicated[at].taps.values, tapped.values);
        EXPECT_EQ(sharded[at].taps.values, tapped.values);
        EXPECT_EQ(replicated[at].normed.values, replicated[0].normed.values);
        EXPECT_EQ(sharded[at].normed.values, replicated[0].normed.values);
        EXPECT_EQ(replicated[at].own_rows, rows);
        own_rows += sharded[at].own_rows;
      }
      EXPECT_EQ(own_rows, rows);  // each row is one rank's
    }
  }
}

}  // namespace
}  // namespace dflash
