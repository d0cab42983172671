#include "worker/comm/host_communicator.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/futex.h"
#include "base/status.h"
#include "kernels/device/buffer.h"

namespace dflash {
namespace {

enum class Kind : uint32_t { kNone, kAllReduce, kAllGather, kReduceScatter, kBroadcast, kBarrier };

const char* NameOf(uint32_t kind) {
  switch (static_cast<Kind>(kind)) {
    case Kind::kNone:
      return "nothing";
    case Kind::kAllReduce:
      return "AllReduce";
    case Kind::kAllGather:
      return "AllGather";
    case Kind::kReduceScatter:
      return "ReduceScatter";
    case Kind::kBroadcast:
      return "Broadcast";
    case Kind::kBarrier:
      return "Barrier";
  }
  return "?";
}

// What a rank says that it is doing, so that ranks that do different things notice.
struct Call {
  uint32_t kind = 0;
  int32_t detail = 0;  // dtype or root
  int64_t size = 0;
  bool operator==(const Call&) const = default;
};

// A counter whose top bit says that the group is dead. Only its rank counts it; anybody may set the bit.
constexpr uint32_t kAborted = uint32_t{1} << 31;
constexpr uint32_t kCountMask = kAborted - 1;
constexpr absl::Duration kLookForDead = absl::Milliseconds(50);
constexpr int kSpins = 200;

struct alignas(64) RankHeader {
  std::atomic<uint32_t> counter;  // exchanges published, modulo 2^31
  std::atomic<int32_t> pid;       // 0: nobody has joined yet
  Call calls[2];
};

enum ReasonState : uint32_t { kNoReason, kWriting, kWritten };

struct alignas(64) SegmentHeader {
  std::atomic<uint32_t> reason_state;
  char reason[252];
};

int64_t HeaderBytes(int size) {
  const auto bytes =
      static_cast<int64_t>(sizeof(SegmentHeader) + static_cast<size_t>(size) * sizeof(RankHeader));
  return (bytes + 4095) / 4096 * 4096;
}

uint32_t* WordOf(std::atomic<uint32_t>& counter) { return reinterpret_cast<uint32_t*>(&counter); }

absl::Status CheckOptions(const HostCommunicator::Options& options) {
  if (options.size < 1 || options.size > HostCommunicator::kMaxRanks) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a host group of ", options.size, " ranks: must be in [1, ", HostCommunicator::kMaxRanks, "]"));
  }
  if (options.timeout <= absl::ZeroDuration()) return absl::InvalidArgumentError("a timeout of nothing");
  return absl::OkStatus();
}

// sum[i] = ((x_0[i] + x_1[i]) + ...): float32, one rounding at the end.
template <typename T>
void SumInRankOrder(const std::vector<const void*>& parts, int64_t count, void* sum) {
  constexpr int64_t kTile = 1024;
  float tile[kTile];
  auto* out = static_cast<T*>(sum);
  for (int64_t begin = 0; begin < count; begin += kTile) {
    const int64_t n = std::min(kTile, count - begin);
    const T* first = static_cast<const T*>(parts[0]) + begin;
    for (int64_t i = 0; i < n; ++i) tile[i] = static_cast<float>(first[i]);
    for (size_t r = 1; r < parts.size(); ++r) {
      const T* part = static_cast<const T*>(parts[r]) + begin;
      for (int64_t i = 0; i < n; ++i) tile[i] += static_cast<float>(part[i]);
    }
    for (int64_t i = 0; i < n; ++i) out[begin + i] = static_cast<T>(tile[i]);
  }
}

void Sum(const std::vector<const void*>& parts, int64_t count, DType dtype, void* sum) {
  switch (dtype) {
    case DType::kF32:
      return SumInRankOrder<float>(parts, count, sum);
    case DType::kBf16:
      return SumInRankOrder<bf16>(parts, count, sum);
  }
}

}  // namespace

class HostCommunicator::Impl {
 public:
  Impl(std::shared_ptr<SharedSegment> segment, int rank, const Options& options)
      : segment_(std::move(segment)),
        rank_(rank),
        options_(options),
        pidfds_(static_cast<size_t>(options.size), -1) {}

  ~Impl() {
    for (int fd : pidfds_) {
      if (fd >= 0) close(fd);
    }
  }

  absl::Status Join() {
    int32_t nobody = 0;
    if (!Rank(rank_).pid.compare_exchange_strong(nobody, getpid())) {
      return absl::AlreadyExistsError(
          absl::StrCat("rank ", rank_, " has joined already (process ", nobody, ")"));
    }
    return absl::OkStatus();
  }

  // A rank that is gone is gone for all.
  void Leave() {
    if (options_.size > 1) Abort(absl::UnavailableError("its communicator was destroyed"));
  }

  // One exchange: `publish` fills this rank's slot, then all ranks' slots may be read until the next one.
  template <typename Publish>
  absl::Status Exchange(const Call& call, Publish publish) {
    DFLASH_RETURN_IF_ERROR(Check());
    const uint32_t current = (exchanges_ + 1) & kCountMask;
    const int parity = static_cast<int>(current & 1);
    if (absl::Status status = publish(Slot(rank_, parity)); !status.ok()) {
      Abort(status);
      return status;
    }
    Rank(rank_).calls[parity] = call;
    uint32_t before = exchanges_;
    if (!Rank(rank_).counter.compare_exchange_strong(before, current, std::memory_order_release)) {
      return Aborted();
    }
    exchanges_ = current;
    parity_ = parity;
    FutexWake(WordOf(Rank(rank_).counter));
    const absl::Time deadline = absl::Now() + options_.timeout;
    for (int peer = 0; peer < options_.size; ++peer) {
      if (peer == rank_) continue;
      DFLASH_RETURN_IF_ERROR(Await(peer, current, deadline, call));
    }
    return absl::OkStatus();
  }

  // The slot of a rank in the exchange that has just taken place.
  const char* Received(int rank) const { return Slot(rank, parity_); }

  void Abort(const absl::Status& reason) {
    uint32_t state = kNoReason;
    if (Header().reason_state.compare_exchange_strong(state, kWriting)) {
      const std::string text = absl::StrCat("rank ", rank_, ": ", reason.message());
      const size_t length = std::min(text.size(), sizeof(Header().reason) - 1);
      std::memcpy(Header().reason, text.data(), length);
      Header().reason[length] = 0;
      Header().reason_state.store(kWritten, std::memory_order_release);
    }
    for (int peer = 0; peer < options_.size; ++peer) {
      Rank(peer).counter.fetch_or(kAborted);
      FutexWake(WordOf(Rank(peer).counter));
    }
  }

  absl::Status Check() const {
    if ((Rank(rank_).counter.load(std::memory_order_acquire) & kAborted) == 0) return absl::OkStatus();
    return Aborted();
  }

  // What every call returns once any rank's counter is seen to be aborted. An abort reaches one counter after
  // the other, so a rank may learn of it from a peer's counter before its own has been marked.
  absl::Status Aborted() const {
    // A rank that died while it wrote the reason leaves none.
    const bool known = Header().reason_state.load(std::memory_order_acquire) == kWritten;
    return absl::UnavailableError(
        absl::StrCat("the group was aborted: ", known ? Header().reason : "reason unknown"));
  }

  int rank() const { return rank_; }
  const Options& options() const { return options_; }
  std::vector<char>& scratch(int64_t bytes) {
    if (static_cast<int64_t>(scratch_.size()) < bytes) scratch_.resize(static_cast<size_t>(bytes));
    return scratch_;
  }

 private:
  SegmentHeader& Header() const { return *static_cast<SegmentHeader*>(segment_->data()); }
  RankHeader& Rank(int rank) const {
    return reinterpret_cast<RankHeader*>(static_cast<char*>(segment_->data()) + sizeof(SegmentHeader))[rank];
  }
  char* Slot(int rank, int parity) const {
    return static_cast<char*>(segment_->data()) + HeaderBytes(options_.size) +
           (rank * 2 + parity) * kSlotBytes;
  }

  // Waits until `peer` has published exchange `wanted`.
  absl::Status Await(int peer, uint32_t wanted, absl::Time deadline, const Call& call) {
    std::atomic<uint32_t>& counter = Rank(peer).counter;
    for (int spins = 0;;) {
      const uint32_t now = counter.load(std::memory_order_acquire);
      // A peer is at most one exchange ahead: it cannot finish the next one without us. What it has published
      // is there, even if it has left since.
      if (((now - wanted) & kCountMask) <= 1) break;
      if ((now & kAborted) != 0) return Aborted();
      if (++spins < kSpins) continue;
      const absl::Time time = absl::Now();
      if (time >= deadline) {
        const absl::Status status = absl::DeadlineExceededError(
            absl::StrCat(NameOf(call.kind), ": rank ", peer, " did not come within ",
                         absl::FormatDuration(options_.timeout)));
        Abort(status);
        return status;
      }
      FutexWait(WordOf(counter), now, std::min(kLookForDead, deadline - time));
      if (counter.load(std::memory_order_acquire) == now && IsDead(peer)) {
        const absl::Status status = absl::UnavailableError(
            absl::StrCat("rank ", peer, " (process ", Rank(peer).pid.load(), ") is gone"));
        Abort(status);
        return status;
      }
    }
    const Call theirs = Rank(peer).calls[wanted & 1];
    if (theirs == call) return absl::OkStatus();
    const absl::Status status = absl::InternalError(absl::StrCat(
        "rank ", rank_, " called ", NameOf(call.kind), " of ", call.size, " (", call.detail, "), rank ", peer,
        " ", NameOf(theirs.kind), " of ", theirs.size, " (", theirs.detail, ")"));
    Abort(status);
    return status;
  }

  // Whether a peer's process has ended. A pidfd names the process that joined, not a later one of its number.
  bool IsDead(int peer) {
    const int32_t pid = Rank(peer).pid.load(std::memory_order_acquire);
    if (pid == 0 || pid == getpid()) return false;
    int& fd = pidfds_[static_cast<size_t>(peer)];
    if (fd < 0) {
      fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
      if (fd < 0) return errno == ESRCH;
    }
    pollfd entry = {.fd = fd, .events = POLLIN, .revents = 0};
    return poll(&entry, 1, 0) == 1;
  }

  const std::shared_ptr<SharedSegment> segment_;
  const int rank_;
  const Options options_;
  std::vector<int> pidfds_;
  uint32_t exchanges_ = 0;  // published by this rank
  int parity_ = 0;
  std::vector<char> scratch_;
};

HostCommunicator::HostCommunicator(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HostCommunicator::~HostCommunicator() { impl_->Leave(); }
int HostCommunicator::rank() const { return impl_->rank(); }
int HostCommunicator::size() const { return impl_->options().size; }
absl::Duration HostCommunicator::timeout() const { return impl_->options().timeout; }
void HostCommunicator::Abort(const absl::Status& reason) { impl_->Abort(reason); }
absl::Status HostCommunicator::Check() { return impl_->Check(); }

int64_t HostCommunicator::SegmentBytes(int size) { return HeaderBytes(size) + size * 2 * kSlotBytes; }

absl::StatusOr<SharedSegment> HostCommunicator::CreateSegment(const Options& options) {
  DFLASH_RETURN_IF_ERROR(CheckOptions(options));
  return SharedSegment::Create(SegmentBytes(options.size));
}

absl::StatusOr<std::unique_ptr<HostCommunicator>> HostCommunicator::Join(
    std::shared_ptr<SharedSegment> segment, int rank, const Options& options) {
  DFLASH_RETURN_IF_ERROR(CheckOptions(options));
  if (rank < 0 || rank >= options.size || segment->bytes() != SegmentBytes(options.size)) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", rank, " of ", options.size,
                                                   " in shared memory of ", segment->bytes(), " bytes"));
  }
  auto impl = std::make_unique<Impl>(std::move(segment), rank, options);
  DFLASH_RETURN_IF_ERROR(impl->Join());
  return std::unique_ptr<HostCommunicator>(new HostCommunicator(std::move(impl)));
}

absl::StatusOr<std::vector<std::unique_ptr<HostCommunicator>>> HostCommunicator::CreateGroup(
    const Options& options) {
  DFLASH_ASSIGN_OR_RETURN(SharedSegment created, CreateSegment(options));
  const auto segment = std::make_shared<SharedSegment>(std::move(created));
  std::vector<std::unique_ptr<HostCommunicator>> ranks;
  for (int rank = 0; rank < options.size; ++rank) {
    DFLASH_ASSIGN_OR_RETURN(ranks.emplace_back(), Join(segment, rank, options));
  }
  return ranks;
}

absl::Status HostCommunicator::AllReduce(void* data, int64_t count, DType dtype, const Stream& stream) {
  if (count < 0) return absl::InvalidArgumentError(absl::StrCat("AllReduce of ", count, " elements"));
  const int64_t width = SizeOf(dtype);
  const Call call = {static_cast<uint32_t>(Kind::kAllReduce), static_cast<int32_t>(dtype), count};
  std::vector<char>& sum = impl_->scratch(std::min(kSlotBytes, count * width));
  std::vector<const void*> parts(static_cast<size_t>(size()));
  int64_t done = 0;
  do {
    const int64_t n = std::min(kSlotBytes / width, count - done);
    char* part = static_cast<char*>(data) + done * width;
    DFLASH_RETURN_IF_ERROR(
        impl_->Exchange(call, [&](char* slot) { return CopyToHost(slot, part, n * width, stream); }));
    for (int r = 0; r < size(); ++r) parts[static_cast<size_t>(r)] = impl_->Received(r);
    Sum(parts, n, dtype, sum.data());
    DFLASH_RETURN_IF_ERROR(CopyToDevice(part, sum.data(), n * width, stream));
    done += n;
  } while (done < count);
  return absl::OkStatus();
}

absl::Status HostCommunicator::AllGather(const void* send, void* receive, int64_t bytes,
                                         const Stream& stream) {
  if (bytes < 0) return absl::InvalidArgumentError(absl::StrCat("AllGather of ", bytes, " bytes"));
  const Call call = {static_cast<uint32_t>(Kind::kAllGather), 0, bytes};
  int64_t done = 0;
  do {
    const int64_t n = std::min(kSlotBytes, bytes - done);
    DFLASH_RETURN_IF_ERROR(impl_->Exchange(call, [&](char* slot) {
      return CopyToHost(slot, static_cast<const char*>(send) + done, n, stream);
    }));
    for (int r = 0; r < size(); ++r) {
      DFLASH_RETURN_IF_ERROR(
          CopyToDevice(static_cast<char*>(receive) + r * bytes + done, impl_->Received(r), n, stream));
    }
    done += n;
  } while (done < bytes);
  return absl::OkStatus();
}

absl::Status HostCommunicator::ReduceScatter(const void* send, void* receive, int64_t count, DType dtype,
                                             const Stream& stream) {
  if (count < 0) return absl::InvalidArgumentError(absl::StrCat("ReduceScatter of ", count, " elements"));
  const int64_t width = SizeOf(dtype);
  const Call call = {static_cast<uint32_t>(Kind::kReduceScatter), static_cast<int32_t>(dtype), count};
  // One exchange carries a piece for every rank, side by side in the slot.
  const int64_t piece = kSlotBytes / width / size();
  // Receive may lie inside send, so it is written only when all of send has been.
  std::vector<char>& sums = impl_->scratch(count * width);
  std::vector<const void*> parts(static_cast<size_t>(size()));
  int64_t done = 0;
  do {
    const int64_t n = std::min(piece, count - done);
    DFLASH_RETURN_IF_ERROR(impl_->Exchange(call, [&](char* slot) {
      for (int r = 0; r < size(); ++r) {
        const char* part = static_cast<const char*>(send) + (r * count + done) * width;
        DFLASH_RETURN_IF_ERROR(CopyToHost(slot + r * n * width, part, n * width, stream));
      }
      return absl::OkStatus();
    }));
    for (int r = 0; r < size(); ++r) parts[static_cast<size_t>(r)] = impl_->Received(r) + rank() * n * width;
    Sum(parts, n, dtype, sums.data() + done * width);
    done += n;
  } while (done < count);
  return CopyToDevice(receive, sums.data(), count * width, stream);
}

absl::Status HostCommunicator::Broadcast(void* data, int64_t bytes, int root, const Stream& stream) {
  if (bytes < 0 || root < 0 || root >= size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("Broadcast of ", bytes, " bytes from rank ", root, " of ", size()));
  }
  const Call call = {static_cast<uint32_t>(Kind::kBroadcast), root, bytes};
  int64_t done = 0;
  do {
    const int64_t n = std::min(kSlotBytes, bytes - done);
    char* part = static_cast<char*>(data) + done;
    DFLASH_RETURN_IF_ERROR(impl_->Exchange(call, [&](char* slot) {
      return rank() == root ? CopyToHost(slot, part, n, stream) : absl::OkStatus();
    }));
    if (rank() != root) DFLASH_RETURN_IF_ERROR(CopyToDevice(part, impl_->Received(root), n, stream));
    done += n;
  } while (done < bytes);
  return absl::OkStatus();
}

absl::Status HostCommunicator::Barrier(const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(Check());
  DFLASH_RETURN_IF_ERROR(stream.Synchronize());
  return impl_->Exchange({static_cast<uint32_t>(Kind::kBarrier), 0, 0},
                         [](char*) { return absl::OkStatus(); });
}

}  // namespace dflash
