#include "kernels/bench/cuda/cublas.h"

#include <cublasLt.h>

#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/cuda/stream_cuda.h"

namespace dflash::bench {
namespace {

static_assert(sizeof(cublasLtMatmulAlgo_t) == sizeof(CublasLinear::Algorithm));
constexpr int64_t kWorkspaceBytes = int64_t{64} << 20;
constexpr int kMaxAlgorithms = 8;

absl::Status CublasStatus(cublasStatus_t code, const char* what) {
  if (code == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, ": ", cublasLtGetStatusName(code)));
}

// The product as cuBLAS sees it: in its column-major world w is [K, N], x is [K, rows] and y = wᵀ x is [N,
// rows].
struct Product {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t w = nullptr, x = nullptr, y = nullptr;

  absl::Status Describe(int64_t rows, int64_t N, int64_t K) {
    DFLASH_RETURN_IF_ERROR(CublasStatus(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F),
                                        "cublasLtMatmulDescCreate"));
    const cublasOperation_t transposed = CUBLAS_OP_T;
    DFLASH_RETURN_IF_ERROR(CublasStatus(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSA,
                                                                       &transposed, sizeof transposed),
                                        "cublasLtMatmulDescSetAttribute"));
    DFLASH_RETURN_IF_ERROR(
        CublasStatus(cublasLtMatrixLayoutCreate(&w, CUDA_R_16BF, K, N, K), "cublasLtMatrixLayoutCreate"));
    DFLASH_RETURN_IF_ERROR(
        CublasStatus(cublasLtMatrixLayoutCreate(&x, CUDA_R_16BF, K, rows, K), "cublasLtMatrixLayoutCreate"));
    return CublasStatus(cublasLtMatrixLayoutCreate(&y, CUDA_R_16BF, N, rows, N),
                        "cublasLtMatrixLayoutCreate");
  }
  ~Product() {
    if (y != nullptr) cublasLtMatrixLayoutDestroy(y);
    if (x != nullptr) cublasLtMatrixLayoutDestroy(x);
    if (w != nullptr) cublasLtMatrixLayoutDestroy(w);
    if (operation != nullptr) cublasLtMatmulDescDestroy(operation);
  }
};

}  // namespace

absl::StatusOr<CublasLinear> CublasLinear::Create(const Stream& stream) {
  DFLASH_ASSIGN_OR_RETURN(Buffer workspace, Buffer::Allocate(kWorkspaceBytes, stream));
  cublasLtHandle_t handle;
  DFLASH_RETURN_IF_ERROR(CublasStatus(cublasLtCreate(&handle), "cublasLtCreate"));
  return CublasLinear(handle, std::move(workspace), stream);
}

CublasLinear::CublasLinear(CublasLinear&& other) noexcept
    : handle_(std::exchange(other.handle_, nullptr)),
      workspace_(std::move(other.workspace_)),
      stream_(other.stream_) {}

CublasLinear::~CublasLinear() {
  if (handle_ != nullptr) cublasLtDestroy(static_cast<cublasLtHandle_t>(handle_));
}

absl::StatusOr<std::vector<CublasLinear::Algorithm>> CublasLinear::Algorithms(int64_t rows, int64_t N,
                                                                              int64_t K) const {
  Product product;
  DFLASH_RETURN_IF_ERROR(product.Describe(rows, N, K));
  cublasLtMatmulPreference_t preference;
  DFLASH_RETURN_IF_ERROR(
      CublasStatus(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate"));
  const size_t workspace_bytes = kWorkspaceBytes;
  cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes,
                                       sizeof workspace_bytes);
  cublasLtMatmulHeuristicResult_t results[kMaxAlgorithms];
  int count = 0;
  const cublasStatus_t code = cublasLtMatmulAlgoGetHeuristic(
      static_cast<cublasLtHandle_t>(handle_), product.operation, product.w, product.x, product.y, product.y,
      preference, kMaxAlgorithms, results, &count);
  cublasLtMatmulPreferenceDestroy(preference);
  DFLASH_RETURN_IF_ERROR(CublasStatus(code, "cublasLtMatmulAlgoGetHeuristic"));
  std::vector<Algorithm> algorithms;
  for (int i = 0; i < count; ++i) {
    if (results[i].state != CUBLAS_STATUS_SUCCESS) continue;
    std::memcpy(algorithms.emplace_back().bytes, &results[i].algo, sizeof(Algorithm));
  }
  if (algorithms.empty()) return absl::InternalError("cuBLASLt offers no algorithm");
  return algorithms;
}

absl::Status CublasLinear::Launch(const void* x, const void* w, void* y, int64_t rows, int64_t N, int64_t K,
                                  const Algorithm& algorithm) const {
  Product product;
  DFLASH_RETURN_IF_ERROR(product.Describe(rows, N, K));
  cublasLtMatmulAlgo_t algo;
  std::memcpy(&algo, algorithm.bytes, sizeof algo);
  const float one = 1, zero = 0;
  return CublasStatus(cublasLtMatmul(static_cast<cublasLtHandle_t>(handle_), product.operation, &one, w,
                                     product.w, x, product.x, &zero, y, product.y, y, product.y, &algo,
                                     workspace_.data(), kWorkspaceBytes, CudaOf(*stream_).stream),
                      "cublasLtMatmul");
}

}  // namespace dflash::bench
