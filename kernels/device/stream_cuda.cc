#include <cuda_runtime_api.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/cuda/cuda_status.h"
#include "kernels/device/cuda/kernel_image.h"
#include "kernels/device/cuda/stream_cuda.h"

namespace dflash {
namespace {

constexpr int kOldestComputeCapability = 80;  // bf16 matrix instructions, asynchronous copies

}  // namespace

Stream::Impl::~Impl() {
  // Nowhere to report errors to. cudaFree waits for the work that uses the memory.
  if (context.stream == nullptr) return;
  (void)cudaSetDevice(context.device);
  (void)cudaFree(context.workspace);
  (void)cudaFree(context.flags);
  (void)cudaStreamDestroy(context.stream);
}

Stream::Stream(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Stream::Stream(Stream&&) noexcept = default;
Stream& Stream::operator=(Stream&&) noexcept = default;
Stream::~Stream() = default;

absl::StatusOr<Stream> Stream::Create(const Options& options) {
  if (options.threads < 0 || options.threads > 256) {
    return absl::InvalidArgumentError(absl::StrCat("threads must be in [0, 256], got ", options.threads));
  }
  int devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess) {
    (void)cudaGetLastError();
    return absl::UnavailableError(
        absl::StrCat("no usable NVIDIA GPU or driver: ", cudaGetErrorString(error)));
  }
  if (options.device < 0 || options.device >= devices) {
    return absl::UnavailableError(
        absl::StrCat("no GPU with ordinal ", options.device, ": this process sees ", devices));
  }
  auto impl = std::make_unique<Impl>();
  CudaContext& context = impl->context;
  context.device = options.device;
  DFLASH_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(options.device), "cudaSetDevice"));
  int major = 0, minor = 0;
  const std::pair<int*, cudaDeviceAttr> attributes[] = {
      {&major, cudaDevAttrComputeCapabilityMajor},
      {&minor, cudaDevAttrComputeCapabilityMinor},
      {&context.multiprocessors, cudaDevAttrMultiProcessorCount},
  };
  for (const auto& [value, attribute] : attributes) {
    DFLASH_RETURN_IF_ERROR(
        CudaStatus(cudaDeviceGetAttribute(value, attribute, options.device), "cudaDeviceGetAttribute"));
  }
  context.compute_capability = 10 * major + minor;
  if (context.compute_capability < kOldestComputeCapability) {
    return absl::UnavailableError(absl::StrCat("GPU ", options.device, " has compute capability ", major, ".",
                                               minor, "; 8.0 or later is needed"));
  }
  if (const cudaError_t error = FindKernels(); error != cudaSuccess) {
    (void)cudaGetLastError();
    return absl::UnavailableError(
        absl::StrCat("GPU ", options.device, " has compute capability ", major, ".", minor,
                     ", for which this build has no kernels: ", cudaGetErrorString(error)));
  }
  DFLASH_RETURN_IF_ERROR(CudaStatus(cudaStreamCreateWithFlags(&context.stream, cudaStreamNonBlocking),
                                    "cudaStreamCreateWithFlags"));
  const int64_t flag_bytes = kWorkspaceFlags * static_cast<int64_t>(sizeof(int32_t));
  DFLASH_RETURN_IF_ERROR(CudaAllocationStatus(cudaMalloc(&context.workspace, kWorkspaceBytes),
                                              "workspace of a stream", kWorkspaceBytes));
  void* flags = nullptr;
  DFLASH_RETURN_IF_ERROR(CudaAllocationStatus(cudaMalloc(&flags, static_cast<size_t>(flag_bytes)),
                                              "flags of a stream", flag_bytes));
  context.flags = static_cast<int32_t*>(flags);
  DFLASH_RETURN_IF_ERROR(
      CudaStatus(cudaMemsetAsync(context.flags, 0, static_cast<size_t>(flag_bytes), context.stream),
                 "clearing the flags of a stream"));
  Stream stream(std::move(impl));
  DFLASH_RETURN_IF_ERROR(stream.Synchronize());
  return stream;
}

absl::Status Stream::Synchronize() const {
  return CudaStatus(cudaStreamSynchronize(impl_->context.stream), "the GPU reports");
}

void* Stream::native_handle() const { return impl_->context.stream; }

const char* BackendName() { return "cuda"; }

absl::Status SelectInstructionSet(const std::string& name) {
  if (name == "auto") return absl::OkStatus();
  return absl::InvalidArgumentError("instruction sets are the CPU backend's");
}

}  // namespace dflash
