#include <cuda_runtime_api.h>

#include <utility>

#include "base/status.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/device/graph.h"

namespace dflash {

struct Graph::Impl {
  cudaGraphExec_t raw = nullptr;

  Impl() = default;
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() {
    if (raw != nullptr) (void)cudaGraphExecDestroy(raw);  // nowhere to report to
  }
};

Graph::Graph(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Graph::Graph(Graph&&) noexcept = default;
Graph& Graph::operator=(Graph&&) noexcept = default;
Graph::~Graph() = default;

absl::StatusOr<Graph> Graph::Capture(const Stream& stream, std::function<absl::Status()> body) {
  const CudaContext& context = CudaOf(stream);
  DFLASH_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(context.device), "cudaSetDevice"));
  DFLASH_RETURN_IF_ERROR(CudaStatus(cudaStreamBeginCapture(context.stream, cudaStreamCaptureModeThreadLocal),
                                    "cudaStreamBeginCapture"));
  const absl::Status captured = body();
  cudaGraph_t graph = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(context.stream, &graph);  // also after a failed body
  if (!captured.ok() || ended != cudaSuccess) {
    if (graph != nullptr) (void)cudaGraphDestroy(graph);
    DFLASH_RETURN_IF_ERROR(captured);
    return CudaStatus(ended, "cudaStreamEndCapture");
  }
  auto impl = std::make_unique<Impl>();
  const cudaError_t instantiated = cudaGraphInstantiate(&impl->raw, graph, 0);
  (void)cudaGraphDestroy(graph);
  DFLASH_RETURN_IF_ERROR(CudaStatus(instantiated, "cudaGraphInstantiate"));
  DFLASH_RETURN_IF_ERROR(CudaStatus(cudaGraphUpload(impl->raw, context.stream), "cudaGraphUpload"));
  return Graph(std::move(impl));
}

bool Graph::IsCaptureCostly() { return true; }

absl::Status Graph::Launch(const Stream& stream) const {
  return CudaStatus(cudaGraphLaunch(impl_->raw, CudaOf(stream).stream), "cudaGraphLaunch");
}

}  // namespace dflash
