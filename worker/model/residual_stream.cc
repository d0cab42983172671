#include "worker/model/residual_stream.h"

#include <algorithm>

#include "base/check.h"
#include "base/status.h"
#include "kernels/rms_norm/rms_norm.h"

namespace dflash {

ResidualStream::ResidualStream(Communicator* communicator, ResidualLayout layout, int64_t rows,
                               const Scratch& scratch, float eps, const Stream& stream)
    : communicator_(communicator),
      layout_(communicator->size() == 1 ? ResidualLayout::kReplicated : layout),
      rows_(rows),
      scratch_(scratch),
      eps_(eps),
      stream_(&stream) {
  const int64_t padded = sharded() ? PaddedRows(rows, communicator->size()) : rows;
  for (const MatrixView& view : {scratch.hidden, scratch.normed, scratch.product})
    DFLASH_CHECK(view.rows >= padded && view.row_stride == view.cols);
  share_ = sharded() ? padded / communicator->size() : rows;
  first_row_ = sharded() ? share_ * communicator->rank() : 0;
  own_count_ = std::clamp<int64_t>(rows - first_row_, 0, share_);
}

absl::Status ResidualStream::Sum(MatrixView all) const {
  if (communicator_->size() == 1) return absl::OkStatus();
  if (sharded()) {
    return communicator_->ReduceScatter(all.data, Share(all).data, share_ * all.cols, all.dtype, *stream_);
  }
  return communicator_->AllReduce(all.data, rows_ * all.cols, all.dtype, *stream_);
}

absl::Status ResidualStream::Gather(MatrixView all) const {
  if (!sharded()) return absl::OkStatus();
  const MatrixView share = Share(all);
  return communicator_->AllGather(share.data, all.data, share_ * all.cols * SizeOf(all.dtype), *stream_);
}

absl::Status ResidualStream::Begin() { return Sum(scratch_.hidden); }

absl::Status ResidualStream::Norm(ConstMatrixView weight) {
  DFLASH_RETURN_IF_ERROR(
      RmsNorm(Share(scratch_.hidden), weight, NormWeight::kOnePlus, eps_, Share(scratch_.normed), *stream_));
  return Gather(scratch_.normed);
}

absl::Status ResidualStream::AddNorm(ConstMatrixView weight) {
  if (!sharded()) {
    return communicator_->AllReduceAddRmsNorm(product(), Share(scratch_.hidden), weight, NormWeight::kOnePlus,
                                              eps_, Share(scratch_.normed), *stream_);
  }
  DFLASH_RETURN_IF_ERROR(Sum(scratch_.product));
  DFLASH_RETURN_IF_ERROR(AddRmsNorm(Share(scratch_.hidden), Share(scratch_.product), weight,
                                    NormWeight::kOnePlus, eps_, Share(scratch_.normed), *stream_));
  return Gather(scratch_.normed);
}

absl::Status ResidualStream::GatherTaps(MatrixView taps) const {
  DFLASH_CHECK(taps.row_stride == taps.cols);
  return Gather(taps);
}

}  // namespace dflash
