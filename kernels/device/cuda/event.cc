#include "kernels/device/cuda/event.h"

#include "base/status.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/stream_cuda.h"

namespace dflash {

absl::StatusOr<Event> Event::Create(Timing timing, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(CudaOf(stream).device), "cudaSetDevice"));
  cudaEvent_t raw = nullptr;
  const unsigned flags = timing == Timing::kOn ? cudaEventDefault : cudaEventDisableTiming;
  DFLASH_RETURN_IF_ERROR(CudaStatus(cudaEventCreateWithFlags(&raw, flags), "cudaEventCreateWithFlags"));
  return Event(raw);
}

Event::~Event() {
  if (raw_ != nullptr) (void)cudaEventDestroy(raw_);  // nowhere to report to
}

absl::Status Event::Record(const Stream& stream) const {
  return CudaStatus(cudaEventRecord(raw_, CudaOf(stream).stream), "cudaEventRecord");
}

absl::StatusOr<bool> Event::IsReached() const {
  const cudaError_t error = cudaEventQuery(raw_);
  if (error == cudaErrorNotReady) return false;
  DFLASH_RETURN_IF_ERROR(CudaStatus(error, "the GPU reports"));
  return true;
}

absl::Status Event::Synchronize() const { return CudaStatus(cudaEventSynchronize(raw_), "the GPU reports"); }

absl::Status Event::Precede(const Stream& stream) const {
  return CudaStatus(cudaStreamWaitEvent(CudaOf(stream).stream, raw_, 0), "cudaStreamWaitEvent");
}

absl::StatusOr<float> Event::MillisecondsBetween(const Event& start, const Event& end) {
  float milliseconds = 0;
  DFLASH_RETURN_IF_ERROR(
      CudaStatus(cudaEventElapsedTime(&milliseconds, start.raw_, end.raw_), "cudaEventElapsedTime"));
  return milliseconds;
}

}  // namespace dflash
