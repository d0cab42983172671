#include "worker/comm/nccl_communicator.h"

#include <dlfcn.h>
#include <nccl.h>

#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "kernels/device/buffer.h"

namespace dflash {
namespace {

// The functions of libnccl.so.2 that are used here.
struct NcclLibrary {
  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRankConfig) init_rank = nullptr;
  decltype(&ncclCommGetAsyncError) async_error = nullptr;
  decltype(&ncclCommAbort) abort = nullptr;
  decltype(&ncclCommDestroy) destroy = nullptr;
  decltype(&ncclCommFinalize) finalize = nullptr;
  decltype(&ncclAllReduce) all_reduce = nullptr;
  decltype(&ncclAllGather) all_gather = nullptr;
  decltype(&ncclReduceScatter) reduce_scatter = nullptr;
  decltype(&ncclBroadcast) broadcast = nullptr;
  decltype(&ncclGetErrorString) error_string = nullptr;
  decltype(&ncclGetLastError) last_error = nullptr;

  static absl::StatusOr<NcclLibrary> Load() {
    void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);  // stays until the process ends
    if (library == nullptr) return absl::UnavailableError(absl::StrCat("no NCCL: ", dlerror()));
    NcclLibrary nccl;
    std::string missing;
    const auto find = [&](const char* name, auto* function) {
      *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
      if (*function == nullptr) missing = name;
    };
    find("ncclGetUniqueId", &nccl.get_unique_id);
    find("ncclCommInitRankConfig", &nccl.init_rank);
    find("ncclCommGetAsyncError", &nccl.async_error);
    find("ncclCommAbort", &nccl.abort);
    find("ncclCommDestroy", &nccl.destroy);
    find("ncclCommFinalize", &nccl.finalize);
    find("ncclAllReduce", &nccl.all_reduce);
    find("ncclAllGather", &nccl.all_gather);
    find("ncclReduceScatter", &nccl.reduce_scatter);
    find("ncclBroadcast", &nccl.broadcast);
    find("ncclGetErrorString", &nccl.error_string);
    find("ncclGetLastError", &nccl.last_error);
    if (!missing.empty()) return absl::UnavailableError(absl::StrCat("libnccl.so.2 has no ", missing));
    return nccl;
  }

  // Keeps "a peer or the network failed" apart from our own mistakes. `comm` may be null.
  absl::Status ToStatus(ncclResult_t result, ncclComm_t comm, const char* what) const {
    if (result == ncclSuccess) return absl::OkStatus();
    const std::string text = absl::StrCat(what, ": ", error_string(result), " (", last_error(comm), ")");
    if (result == ncclRemoteError || result == ncclSystemError) return absl::UnavailableError(text);
    if (result == ncclInvalidArgument || result == ncclInvalidUsage) return absl::InvalidArgumentError(text);
    return absl::InternalError(text);
  }
};

ncclDataType_t TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return ncclFloat32;
    case DType::kBf16:
      return ncclBfloat16;
  }
  return ncclFloat32;
}

cudaStream_t StreamOf(const Stream& stream) { return static_cast<cudaStream_t>(stream.native_handle()); }

// Every call into NCCL is made under the mutex and does not wait (the communicator is non-blocking), so Abort
// gets its turn whatever another thread waits for.
class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(const NcclLibrary& nccl, const NcclOptions& options) : nccl_(nccl), options_(options) {}

  ~NcclCommunicator() override {
    absl::MutexLock lock(&mutex_);
    if (comm_ == nullptr) return;
    // An orderly end would wait for peers that may be gone: all that counts has been waited for already.
    (void)nccl_.abort(comm_);
    comm_ = nullptr;
  }

  absl::Status Init(const Stream& stream) {
    ncclUniqueId id;
    if (options_.unique_id.size() != sizeof(id)) return absl::InvalidArgumentError("not a unique id of NCCL");
    std::memcpy(&id, options_.unique_id.data(), sizeof(id));
    DFLASH_ASSIGN_OR_RETURN(token_,
                            Buffer::Allocate(sizeof(float), stream));  // also makes the device current
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    absl::MutexLock lock(&mutex_);
    const ncclResult_t result = nccl_.init_rank(&comm_, options_.size, id, options_.rank, &config);
    return FinishLocked(result, "ncclCommInitRankConfig");
  }

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }

  absl::Status AllReduce(void* data, int64_t count, DType dtype, const Stream& stream) override {
    if (count < 0) return absl::InvalidArgumentError(absl::StrCat("AllReduce of ", count, " elements"));
    return Call("AllReduce", [&] {
      return nccl_.all_reduce(data, data, static_cast<size_t>(count), TypeOf(dtype), ncclSum, comm_,
                              StreamOf(stream));
    });
  }

  absl::Status AllGather(const void* send, void* receive, int64_t bytes, const Stream& stream) override {
    if (bytes < 0) return absl::InvalidArgumentError(absl::StrCat("AllGather of ", bytes, " bytes"));
    return Call("AllGather", [&] {
      return nccl_.all_gather(send, receive, static_cast<size_t>(bytes), ncclInt8, comm_, StreamOf(stream));
    });
  }

  absl::Status ReduceScatter(const void* send, void* receive, int64_t count, DType dtype,
                             const Stream& stream) override {
    if (count < 0) return absl::InvalidArgumentError(absl::StrCat("ReduceScatter of ", count, " elements"));
    return Call("ReduceScatter", [&] {
      return nccl_.reduce_scatter(send, receive, static_cast<size_t>(count), TypeOf(dtype), ncclSum, comm_,
                                  StreamOf(stream));
    });
  }

  absl::Status Broadcast(void* data, int64_t bytes, int root, const Stream& stream) override {
    if (bytes < 0 || root < 0 || root >= options_.size) {
      return absl::InvalidArgumentError(
          absl::StrCat("Broadcast of ", bytes, " bytes from rank ", root, " of ", options_.size));
    }
    return Call("Broadcast", [&] {
      return nccl_.broadcast(data, data, static_cast<size_t>(bytes), ncclInt8, root, comm_, StreamOf(stream));
    });
  }

  absl::Status Barrier(const Stream& stream) override {
    DFLASH_RETURN_IF_ERROR(AllReduce(token_.data(), 1, DType::kF32, stream));
    // Somebody has to look at the clock while this thread waits for the stream.
    absl::Mutex mutex;
    bool done = false, late = false;
    std::thread watch([&] {
      absl::MutexLock lock(&mutex);
      late = !mutex.AwaitWithTimeout(absl::Condition(&done), options_.timeout);
      if (late) Abort(absl::DeadlineExceededError(LateText("Barrier")));
    });
    const absl::Status status = stream.Synchronize();
    {
      absl::MutexLock lock(&mutex);
      done = true;
    }
    watch.join();
    if (late) return absl::DeadlineExceededError(LateText("Barrier"));
    DFLASH_RETURN_IF_ERROR(status);
    return Check();
  }

  void Abort(const absl::Status& reason) override {
    absl::MutexLock lock(&mutex_);
    AbortLocked(reason);
  }

  absl::Status Check() override {
    absl::MutexLock lock(&mutex_);
    DFLASH_RETURN_IF_ERROR(aborted_);
    ncclResult_t state = ncclSuccess;
    absl::Status status = nccl_.ToStatus(nccl_.async_error(comm_, &state), comm_, "ncclCommGetAsyncError");
    if (status.ok() && state != ncclInProgress) status = nccl_.ToStatus(state, comm_, "NCCL reports");
    if (!status.ok()) AbortLocked(status);
    return status;
  }

  bool sums_in_rank_order() const override { return options_.size <= 2; }
  bool capturable() const override { return true; }
  absl::Duration timeout() const override { return options_.timeout; }
  const char* name() const override { return "nccl"; }

 private:
  std::string LateText(const char* what) const {
    return absl::StrCat(what, ": not finished within ", absl::FormatDuration(options_.timeout));
  }

  template <typename Function>
  absl::Status Call(const char* what, Function function) {
    absl::MutexLock lock(&mutex_);
    DFLASH_RETURN_IF_ERROR(aborted_);
    return FinishLocked(function(), what);
  }

  // A non-blocking communicator may need more time to enqueue (its first use of a connection).
  absl::Status FinishLocked(ncclResult_t result, const char* what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const absl::Time deadline = absl::Now() + options_.timeout;
    while (result == ncclInProgress) {
      if (const absl::Status status = nccl_.ToStatus(nccl_.async_error(comm_, &result), comm_, what);
          !status.ok()) {
        AbortLocked(status);
        return status;
      }
      if (result != ncclInProgress) break;
      if (absl::Now() >= deadline) {
        const absl::Status status = absl::DeadlineExceededError(LateText(what));
        AbortLocked(status);
        return status;
      }
      // Others may abort meanwhile.
      mutex_.Unlock();
      std::this_thread::yield();
      mutex_.Lock();
      DFLASH_RETURN_IF_ERROR(aborted_);
    }
    const absl::Status status = nccl_.ToStatus(result, comm_, what);
    if (!status.ok()) AbortLocked(status);
    return status;
  }

  void AbortLocked(const absl::Status& reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!aborted_.ok()) return;
    aborted_ = absl::UnavailableError(
        absl::StrCat("the group was aborted: rank ", options_.rank, ": ", reason.message()));
    if (comm_ != nullptr) (void)nccl_.abort(comm_);
    comm_ = nullptr;
  }

  const NcclLibrary nccl_;
  const NcclOptions options_;
  Buffer token_;
  absl::Mutex mutex_;
  ncclComm_t comm_ ABSL_GUARDED_BY(mutex_) = nullptr;
  absl::Status aborted_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<std::string> NcclUniqueId() {
  DFLASH_ASSIGN_OR_RETURN(const NcclLibrary nccl, NcclLibrary::Load());
  ncclUniqueId id;
  DFLASH_RETURN_IF_ERROR(nccl.ToStatus(nccl.get_unique_id(&id), nullptr, "ncclGetUniqueId"));
  return std::string(id.internal, sizeof(id.internal));
}

absl::StatusOr<std::unique_ptr<Communicator>> MakeNcclCommunicator(const NcclOptions& options,
                                                                   const Stream& stream) {
  DFLASH_ASSIGN_OR_RETURN(const NcclLibrary nccl, NcclLibrary::Load());
  auto communicator = std::make_unique<NcclCommunicator>(nccl, options);
  DFLASH_RETURN_IF_ERROR(communicator->Init(stream));
  return std::unique_ptr<Communicator>(std::move(communicator));
}

}  // namespace dflash
