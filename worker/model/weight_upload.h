// From a checkpoint's tensors to weights on the device.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device/buffer.h"
#include "kernels/device/stream.h"
#include "kernels/linear/linear.h"
#include "worker/model/checkpoint.h"
#include "worker/model/tensor_slice.h"

namespace dflash {

// Reads one rank's slices of a checkpoint's tensors and uploads them: "the tensor" below is the rank's slice
// of it. Nothing else is read. Errors of all calls: those of Checkpoint::Read; ResourceExhausted.
class WeightUploader {
 public:
  WeightUploader(const Checkpoint& checkpoint, TensorSlices slices, const Stream& stream,
                 const ReadProgress& progress)
      : checkpoint_(checkpoint), slices_(std::move(slices)), stream_(stream), progress_(progress) {}

  // A tensor as stored: [rows, cols] of its matrix form; a vector becomes one row.
  absl::StatusOr<Matrix> Plain(std::string_view name) const;
  // A vector widened to float32.
  absl::StatusOr<Buffer> Float32(std::string_view name) const;
  // Stacks whole tensors along their output rows.
  absl::StatusOr<LinearWeight> Stack(const std::vector<std::string>& names) const;
  // Stacks blocks of output rows, counted inside the slice.
  struct Rows {
    std::string name;
    int64_t first = 0;
    int64_t count = 0;
  };
  absl::StatusOr<LinearWeight> StackRows(const std::vector<Rows>& parts) const;

 private:
  const TensorSlice& SliceOf(std::string_view name) const;
  absl::StatusOr<HostTensor> Read(std::string_view name) const;

  const Checkpoint& checkpoint_;
  TensorSlices slices_;
  const Stream& stream_;
  const ReadProgress& progress_;
};

}  // namespace dflash
