#include "kernels/device/cuda/graph.h"

#include "base/status.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/stream_cuda.h"

namespace dflash {

absl::StatusOr<Graph> Graph::Capture(const Stream& stream, const std::function<absl::Status()>& body) {
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
  cudaGraphExec_t raw = nullptr;
  const cudaError_t instantiated = cudaGraphInstantiate(&raw, graph, 0);
  (void)cudaGraphDestroy(graph);
  DFLASH_RETURN_IF_ERROR(CudaStatus(instantiated, "cudaGraphInstantiate"));
  Graph result(raw);
  DFLASH_RETURN_IF_ERROR(CudaStatus(cudaGraphUpload(raw, context.stream), "cudaGraphUpload"));
  return result;
}

Graph::~Graph() {
  if (raw_ != nullptr) (void)cudaGraphExecDestroy(raw_);  // nowhere to report to
}

absl::Status Graph::Launch(const Stream& stream) const {
  return CudaStatus(cudaGraphLaunch(raw_, CudaOf(stream).stream), "cudaGraphLaunch");
}

}  // namespace dflash
