#include "kernels/linear/linear_cuda.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/cuda/copy_rows.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/linear/linear_backend.h"
#include "kernels/linear/linear_call_cuda.h"

namespace dflash {

// As measured: docs/adr/0007-one-weight-layout-two-kernels.md. (Elsewhere than on Hopper both phases are one
// kernel.)
Phase FasterLinearPhase(int64_t rows) { return rows > 224 ? Phase::kPrefill : Phase::kVerify; }

PackedWeight PackedWeightOf(const LinearWeight& weight) {
  PackedWeight packed = {weight.packed().data(), weight.out_features(), weight.in_features()};
  const int64_t half = weight.out_features() / 2;
  if (weight.use() == LinearUse::kGateUp && half % 8 == 0) packed.features = half;
  return packed;
}

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
                       const CudaContext& context, LinearResult result) {
  // The two fast kernels are made of warpgroup products, which Hopper alone has.
  if (context.compute_capability != 90) return LaunchLinearPortable(x, weight, y, context, result);
  return phase == Phase::kVerify ? LaunchLinearStream(x, weight, y, context, result)
                                 : LaunchLinearTiled(x, weight, y, context, result);
}

}  // namespace

namespace backend {

absl::StatusOr<int64_t> PackedLinearBytes(int64_t out_features, int64_t in_features, DType dtype) {
  DFLASH_RETURN_IF_ERROR(CheckSize(out_features, in_features));
  if (dtype == DType::kF32) return out_features * in_features * SizeOf(dtype);
  return PackedWeight{nullptr, out_features, in_features}.Bytes();
}

absl::Status PackRows(ConstMatrixView rows, int64_t first_output, const LinearWeight& weight,
                      const Stream& stream) {
  const CudaContext& context = CudaOf(stream);
  if (rows.dtype == DType::kF32) {
    float* to = weight.packed().As<float>() + first_output * weight.in_features();
    return CudaStatus(LaunchCopyRows(rows, MatrixView(to, rows.rows, rows.cols), context),
                      "packing a weight");
  }
  return CudaStatus(
      LaunchPackRows(rows, first_output, PackedWeightOf(weight), weight.packed().data(), context),
      "packing a weight");
}

absl::Status PackHostRows(ConstMatrixView rows, int64_t first_output, const LinearWeight& weight,
                          const Stream& stream) {
  const CudaContext& context = CudaOf(stream);
  const auto row_bytes = rows.cols * SizeOf(rows.dtype);
  const int64_t rows_at_once = kWorkspaceBytes / row_bytes;
  if (rows_at_once < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("linear weight: rows of ", row_bytes, " bytes are too long"));
  }
  for (int64_t row = 0; row < rows.rows; row += rows_at_once) {
    const ConstMatrixView part = rows.Rows(row, std::min(rows_at_once, rows.rows - row));
    DFLASH_RETURN_IF_ERROR(
        CudaStatus(cudaMemcpy2DAsync(context.workspace, static_cast<size_t>(row_bytes), part.data,
                                     static_cast<size_t>(part.row_stride * SizeOf(part.dtype)),
                                     static_cast<size_t>(row_bytes), static_cast<size_t>(part.rows),
                                     cudaMemcpyHostToDevice, context.stream),
                   "copy of a weight to the device"));
    const ConstMatrixView staged(context.workspace, part.dtype, part.rows, part.cols, part.cols);
    DFLASH_RETURN_IF_ERROR(PackRows(staged, first_output + row, weight, stream));
  }
  return stream.Synchronize();  // the host memory may go
}

absl::Status Linear(ConstMatrixView x, const LinearWeight& w, Phase phase, MatrixView y,
                    const Stream& stream) {
  if (w.dtype() == DType::kF32) {
    return CudaStatus(LaunchLinearF32(x, w.packed().As<float>(), w.in_features(), y, CudaOf(stream)),
                      "Linear");
  }
  return CallLinear(x, PackedWeightOf(w), phase, y, LinearResult::kSums, stream);
}

}  // namespace backend

absl::Status CallLinear(ConstMatrixView x, const PackedWeight& weight, Phase phase, MatrixView y,
                        LinearResult result, const Stream& stream) {
  const CudaContext& context = CudaOf(stream);
  if (IsBulkReadable(x)) return CudaStatus(LaunchBf16(x, weight, phase, y, context, result), "Linear");

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
        CudaStatus(LaunchBf16(aligned, weight, phase, y.Rows(row, rows), context, result), "Linear"));
  }
  return absl::OkStatus();
}

}  // namespace dflash
