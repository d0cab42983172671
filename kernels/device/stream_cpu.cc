#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/host_limits.h"
#include "kernels/device/cpu/instruction_set.h"
#include "kernels/device/cpu/thread_pool.h"
#include "kernels/device/stream.h"

namespace dflash {

struct Stream::Impl {
  explicit Impl(int threads) : pool(threads) {}
  ThreadPool pool;
};

Stream::Stream(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Stream::Stream(Stream&&) noexcept = default;
Stream& Stream::operator=(Stream&&) noexcept = default;
Stream::~Stream() = default;

absl::StatusOr<Stream> Stream::Create(const Options& options) {
  if (options.threads < 0 || options.threads > 256) {
    return absl::InvalidArgumentError(absl::StrCat("threads must be in [0, 256], got ", options.threads));
  }
  const int threads = options.threads > 0 ? options.threads : std::min(AvailableCores(), 256);
  return Stream(std::make_unique<Impl>(threads));
}

absl::Status Stream::Synchronize() const { return absl::OkStatus(); }
void* Stream::native_handle() const { return nullptr; }

ThreadPool& ThreadsOf(const Stream& stream) { return stream.impl().pool; }

const char* BackendName() { return "cpu"; }

absl::Status SelectInstructionSet(const std::string& name) {
  if (name == "auto") return absl::OkStatus();
  for (InstructionSet set : {InstructionSet::kScalar, InstructionSet::kAvx2, InstructionSet::kAvx512}) {
    if (name == Name(set)) return SetInstructionSet(set);
  }
  return absl::InvalidArgumentError(absl::StrCat("no instruction set is called ", name));
}

}  // namespace dflash
