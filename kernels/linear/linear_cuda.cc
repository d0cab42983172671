#include "kernels/linear/linear_cuda.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/cuda/copy_rows.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/linear/linear_backend.h"

namespace dflash::backend {
namespace {

// The end of the workspace, where rows of x are laid out anew when they do not begin at multiples of 16
// bytes. The streaming kernel's partial sums of kStagedRows rows stay below it.
constexpr int64_t kStagingBytes = int64_t{16} << 20;
constexpr int64_t kStagedRows = 64;

absl::Status CheckSize(int64_t out_features, int64_t in_features) {
  if (out_features > INT32_MAX / 2 || in_features > INT32_MAX / 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("linear weight of ", out_features, "x", in_features, " is too large"));
  }
  return absl::OkStatus();
}

cudaError_t LaunchBf16(ConstMatrixView x, const PackedWeight& weight, Phase phase, MatrixView y,
                       const CudaContext& context) {
  // The two fast kernels are made of warpgroup products, which Hopper alone has.
  if (context.compute_capability != 90) return LaunchLinearPortable(x, weight, y, context);
  return phase == Phase::kVerify ? LaunchLinearStream(x, weight, y, context)
                                 : LaunchLinearTiled(x, weight, y, context);
}

}  // namespace

absl::StatusOr<Buffer> PackLinearWeight(const std::vector<ConstMatrixView>& parts, int64_t out_features,
                                        int64_t in_features, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckSize(out_features, in_features));
  const CudaContext& context = CudaOf(stream);
  if (parts[0].dtype == DType::kF32) {
    DFLASH_ASSIGN_OR_RETURN(Buffer dense,
                            Buffer::Allocate(out_features * in_features * SizeOf(DType::kF32), stream));
    auto* to = dense.As<uint8_t>();
    const auto row_bytes = static_cast<size_t>(in_features * SizeOf(DType::kF32));
    for (const ConstMatrixView& part : parts) {
      DFLASH_RETURN_IF_ERROR(CudaStatus(
          cudaMemcpy2DAsync(to, row_bytes, part.data,
                            static_cast<size_t>(part.row_stride * SizeOf(part.dtype)), row_bytes,
                            static_cast<size_t>(part.rows), cudaMemcpyHostToDevice, context.stream),
          "copy of a weight to the device"));
      to += part.rows * static_cast<int64_t>(row_bytes);
    }
    DFLASH_RETURN_IF_ERROR(stream.Synchronize());  // the host memory may go
    return dense;
  }

  PackedWeight weight = {nullptr, out_features, in_features};
  DFLASH_ASSIGN_OR_RETURN(Buffer packed, Buffer::Allocate(weight.Bytes(), stream));
  const int64_t row_bytes = in_features * SizeOf(DType::kBf16);
  const int64_t rows_at_once = kWorkspaceBytes / row_bytes;
  if (rows_at_once < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("linear weight: rows of ", row_bytes, " bytes are too long"));
  }
  int64_t output = 0;
  for (const ConstMatrixView& part : parts) {
    for (int64_t row = 0; row < part.rows; row += rows_at_once) {
      const ConstMatrixView rows = part.Rows(row, std::min(rows_at_once, part.rows - row));
      DFLASH_RETURN_IF_ERROR(
          CudaStatus(cudaMemcpy2DAsync(context.workspace, static_cast<size_t>(row_bytes), rows.data,
                                       static_cast<size_t>(rows.row_stride * SizeOf(rows.dtype)),
                                       static_cast<size_t>(row_bytes), static_cast<size_t>(rows.rows),
                                       cudaMemcpyHostToDevice, context.stream),
                     "copy of a weight to the device"));
      const ConstMatrixView staged(context.workspace, DType::kBf16, rows.rows, in_features, in_features);
      DFLASH_RETURN_IF_ERROR(
          CudaStatus(LaunchPackRows(staged, output, weight, packed.data(), context), "packing a weight"));
      output += rows.rows;
    }
  }
  DFLASH_RETURN_IF_ERROR(stream.Synchronize());  // the host memory may go
  return packed;
}

absl::Status Linear(ConstMatrixView x, const LinearWeight& w, Phase phase, MatrixView y,
                    const Stream& stream) {
  const CudaContext& context = CudaOf(stream);
  if (w.dtype() == DType::kF32) {
    return CudaStatus(LaunchLinearF32(x, w.packed().As<float>(), w.in_features(), y, context), "Linear");
  }
  const PackedWeight weight = {w.packed().data(), w.out_features(), w.in_features()};
  if (IsBulkReadable(x)) return CudaStatus(LaunchBf16(x, weight, phase, y, context), "Linear");

  const int64_t stride = (x.cols + 7) / 8 * 8;
  const int64_t rows_at_once = std::min(kStagedRows, kStagingBytes / (stride * SizeOf(x.dtype)));
  if (rows_at_once < 1) {
    return absl::UnimplementedError(absl::StrCat("Linear: unaligned rows of ", x.cols, " columns"));
  }
  auto* staging = static_cast<uint8_t*>(context.workspace) + (kWorkspaceBytes - kStagingBytes);
  for (int64_t row = 0; row < x.rows; row += rows_at_once) {
    const int64_t rows = std::min(rows_at_once, x.rows - row);
    const MatrixView aligned(staging, x.dtype, rows, x.cols, stride);
    DFLASH_RETURN_IF_ERROR(CudaStatus(LaunchCopyRows(x.Rows(row, rows), aligned, context), "Linear"));
    DFLASH_RETURN_IF_ERROR(
        CudaStatus(LaunchBf16(aligned, weight, phase, y.Rows(row, rows), context), "Linear"));
  }
  return absl::OkStatus();
}

}  // namespace dflash::backend
