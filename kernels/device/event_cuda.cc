#include <cuda_runtime_api.h>

#include "base/status.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/stream_cuda.h"
#include "kernels/device/event.h"

namespace dflash {
namespace {

cudaEvent_t CudaEvent(void* raw) { return static_cast<cudaEvent_t>(raw); }

}  // namespace

absl::StatusOr<Event> Event::Create(Timing timing, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(CudaOf(stream).device), "cudaSetDevice"));
  cudaEvent_t raw = nullptr;
  const unsigned flags = timing == Timing::kOn ? cudaEventDefault : cudaEventDisableTiming;
  DFLASH_RETURN_IF_ERROR(CudaStatus(cudaEventCreateWithFlags(&raw, flags), "cudaEventCreateWithFlags"));
  return Event(raw);
}

Event::~Event() {
  if (raw_ != nullptr) (void)cudaEventDestroy(CudaEvent(raw_));  // nowhere to report to
}

absl::Status Event::Record(const Stream& stream) const {
  return CudaStatus(cudaEventRecord(CudaEvent(raw_), CudaOf(stream).stream), "cudaEventRecord");
}

absl::StatusOr<bool> Event::IsReached() const {
  const cudaError_t error = cudaEventQuery(CudaEvent(raw_));
  if (error == cudaErrorNotReady) return false;
  DFLASH_RETURN_IF_ERROR(CudaStatus(error, "the GPU reports"));
  return true;
}

absl::Status Event::Synchronize() const {
  return CudaStatus(cudaEventSynchronize(CudaEvent(raw_)), "the GPU reports");
}

absl::Status Event::Precede(const Stream& stream) const {
  return CudaStatus(cudaStreamWaitEvent(CudaOf(stream).stream, CudaEvent(raw_), 0), "cudaStreamWaitEvent");
}

absl::StatusOr<float> Event::MillisecondsBetween(const Event& start, const Event& end) {
  float milliseconds = 0;
  DFLASH_RETURN_IF_ERROR(
      CudaStatus(cudaEventElapsedTime(&milliseconds, CudaEvent(start.raw_), CudaEvent(end.raw_)),
                 "cudaEventElapsedTime"));
  return milliseconds;
}

}  // namespace dflash
