// The residual stream of one group of rows on the ranks of a group: where the row-parallel products are
// summed. Two layouts with equal bits, since every sum is taken in the order of ranks:
//   replicated  every rank has all rows; a product costs one all-reduce.
//   sharded     by rows: rank r has rows [r * share, (r + 1) * share), share = ceil(rows / ranks). A product
//   costs a
//               reduce-scatter, and the normed rows that the next one reads an all-gather. Norms and residual
//               are computed once, not once per rank: for long prompts.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "base/matrix_view.h"
#include "kernels/device/stream.h"
#include "worker/comm/communicator.h"

namespace dflash {

enum class ResidualLayout : uint8_t { kReplicated, kSharded };

class ResidualStream {
 public:
  // Scratch of at least PaddedRows(rows, ranks) rows [.., D], dense, activation dtype.
  struct Scratch {
    MatrixView hidden, normed, product;
  };
  static int64_t PaddedRows(int64_t rows, int64_t ranks) { return (rows + ranks - 1) / ranks * ranks; }

  // Nothing is owned. eps: of the norms, which are the target's (1 + w).
  ResidualStream(Communicator* communicator, ResidualLayout layout, int64_t rows, const Scratch& scratch,
                 float eps, const Stream& stream);

  // All rows of this rank's terms: of the embedding, then of each row-parallel product.
  MatrixView embedding() const { return scratch_.hidden.Rows(0, rows_); }
  MatrixView product() const { return scratch_.product.Rows(0, rows_); }
  // All rows, normed: what the next projection reads.
  MatrixView normed() const { return scratch_.normed.Rows(0, rows_); }
  // This rank's rows of the residual, without padding, and the first of them.
  MatrixView own_rows() const { return scratch_.hidden.Rows(first_row_, own_count_); }
  int64_t first_row() const { return first_row_; }

  // residual = sum over the ranks of embedding().
  absl::Status Begin();
  // normed() = norm(residual).
  absl::Status Norm(ConstMatrixView weight);
  // residual += sum over the ranks of product(); normed() = norm(residual).
  absl::Status AddNorm(ConstMatrixView weight);

  // GatherTaps: `taps` is dense [PaddedRows, ..] and holds this rank's rows of the residual at their place;
  // afterwards all rows, in row order. With a replicated residual they are all there already.
  absl::Status GatherTaps(MatrixView taps) const;

 private:
  bool sharded() const { return layout_ == ResidualLayout::kSharded; }
  // The share with its padding.
  MatrixView Share(MatrixView all) const { return all.Rows(first_row_, share_); }
  // rows = sum over the ranks, in the rows that this rank keeps.
  absl::Status Sum(MatrixView all) const;
  absl::Status Gather(MatrixView all) const;

  Communicator* communicator_;
  ResidualLayout layout_;
  int64_t rows_;
  Scratch scratch_;
  float eps_;
  const Stream* stream_;
  int64_t share_ = 0;
  int64_t first_row_ = 0;
  int64_t own_count_ = 0;
};

}  // namespace dflash
