#include "base/status.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/launch.cuh"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/device/cuda/vector.cuh"
#include "kernels/elementary/elementary.h"
#include "kernels/linear/linear_call_cuda.h"
#include "kernels/swiglu/swiglu_backend.h"

namespace dflash::backend {
namespace {

constexpr int kThreads = 256;

// y = f(gate) * x, element by element; block (row, 256 chunks of columns). y may be x.
template <bool kVectorized, bool kSilu>
__global__ void GateKernel(Bf16Rows gate, Bf16Rows x, Bf16Rows y, int64_t cols) {
  LetNextKernelStart();
  const int64_t col = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * kChunk;
  if (col >= cols) return;
  const int count = static_cast<int>(min(cols - col, int64_t{kChunk}));
  WaitForPreviousKernel();
  float gates[kChunk], values[kChunk];
  Load<kVectorized>(gate.Row(blockIdx.x) + col, count, gates);
  Load<kVectorized>(x.Row(blockIdx.x) + col, count, values);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) values[i] *= kSilu ? SiluF32(gates[i]) : SigmoidF32(gates[i]);
  Store<kVectorized>(y.Row(blockIdx.x) + col, count, values);
}

template <bool kSilu>
cudaError_t LaunchGate(ConstMatrixView gate, ConstMatrixView x, MatrixView y, const Stream& stream) {
  const LaunchShape shape = {.grid = Grid(y.rows, CeilDiv(y.cols, kThreads * kChunk)),
                             .block = dim3(kThreads)};
  const bool vectorized = IsVectorized(gate) && IsVectorized(x) && IsVectorized(y);
  const auto kernel = vectorized ? GateKernel<true, kSilu> : GateKernel<false, kSilu>;
  return Launch(CudaOf(stream), shape, kernel, Bf16RowsOf(gate), Bf16RowsOf(x), Bf16RowsOf(y), y.cols);
}

}  // namespace

absl::Status SwiGlu(ConstMatrixView gate_up, MatrixView y, const Stream& stream) {
  return CudaStatus(LaunchGate<true>(gate_up.Cols(0, y.cols), gate_up.Cols(y.cols, y.cols), y, stream),
                    "SwiGlu");
}

// The product's kernel does it, where both sums are in one thread.
absl::StatusOr<bool> LinearSwiGlu(ConstMatrixView x, const LinearWeight& w, Phase phase, MatrixView,
                                  MatrixView y, const Stream& stream) {
  if (w.dtype() != DType::kBf16) return false;
  const PackedWeight weight = PackedWeightOf(w);
  if (weight.features == 0) return false;
  DFLASH_RETURN_IF_ERROR(CallLinear(x, weight, phase, y, LinearResult::kSwiGlu, stream));
  return true;
}

absl::Status SigmoidGate(MatrixView x, ConstMatrixView gate, const Stream& stream) {
  return CudaStatus(LaunchGate<false>(gate, x, x, stream), "SigmoidGate");
}

}  // namespace dflash::backend
