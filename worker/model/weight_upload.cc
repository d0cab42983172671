#include "worker/model/weight_upload.h"

#include "base/check.h"
#include "base/status.h"

namespace dflash {

const TensorSlice& WeightUploader::SliceOf(std::string_view name) const {
  const auto slice = slices_.find(name);
  DFLASH_CHECK(slice != slices_.end(), std::string(name).c_str());
  return slice->second;
}

absl::StatusOr<HostTensor> WeightUploader::Read(std::string_view name) const {
  const TensorSlice& slice = SliceOf(name);
  return ReadSlice(checkpoint_, checkpoint_.Get(name), slice, 0, slice.rows(), progress_);
}

absl::StatusOr<Matrix> WeightUploader::Plain(std::string_view name) const {
  const TensorInfo& info = checkpoint_.Get(name);
  DFLASH_ASSIGN_OR_RETURN(HostTensor host, Read(name));
  const bool is_vector = info.shape().size() == 1;
  const int64_t rows = is_vector ? 1 : host.view().rows;
  const int64_t cols = is_vector ? host.view().rows : host.view().cols;
  DFLASH_ASSIGN_OR_RETURN(Matrix matrix, Matrix::Allocate(rows, cols, info.dtype, stream_));
  DFLASH_RETURN_IF_ERROR(CopyToDevice(matrix.view().data, host.data(), host.bytes(), stream_));
  return matrix;
}

absl::StatusOr<Buffer> WeightUploader::Float32(std::string_view name) const {
  DFLASH_ASSIGN_OR_RETURN(HostTensor host, Read(name));
  const ConstMatrixView view = host.view();
  std::vector<float> values;
  for (int64_t row = 0; row < view.rows; ++row) {
    for (int64_t col = 0; col < view.cols; ++col) {
      values.push_back(view.dtype == DType::kF32 ? view.Row<float>(row)[col]
                                                 : static_cast<float>(view.Row<bf16>(row)[col]));
    }
  }
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(float));
  DFLASH_ASSIGN_OR_RETURN(Buffer buffer, Buffer::Allocate(bytes, stream_));
  DFLASH_RETURN_IF_ERROR(CopyToDevice(buffer.data(), values.data(), bytes, stream_));
  return buffer;
}

absl::StatusOr<LinearWeight> WeightUploader::Stack(const std::vector<std::string>& names) const {
  std::vector<Rows> parts;
  for (const std::string& name : names) parts.push_back({name, 0, SliceOf(name).rows()});
  return StackRows(parts);
}

absl::StatusOr<LinearWeight> WeightUploader::StackRows(const std::vector<Rows>& parts) const {
  std::vector<HostTensor> hosts;
  std::vector<ConstMatrixView> views;
  for (const Rows& part : parts) {
    DFLASH_ASSIGN_OR_RETURN(HostTensor host,
                            ReadSlice(checkpoint_, checkpoint_.Get(part.name), SliceOf(part.name), part.first,
                                      part.count, progress_));
    views.push_back(host.view());
    hosts.push_back(std::move(host));
  }
  return LinearWeight::Pack(views, stream_);
}

}  // namespace dflash
