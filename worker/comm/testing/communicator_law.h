// What every communicator owes, as a program that each rank runs and that checks its own results. It needs no
// test framework, so that ranks can be forked processes.
#pragma once

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/dtype.h"
#include "base/status.h"
#include "kernels/device/buffer.h"
#include "worker/comm/communicator.h"

namespace dflash::testing {

// The values of one rank for one call: magnitudes differ by many powers of two, so that a sum in another
// order has other bits.
inline constexpr float kScales[] = {0x1p-43f, 0x1p-39f, 0x1p-35f, 0x1p-31f, 0x1p-27f, 0x1p-23f, 0x1p-19f};
template <typename T>
std::vector<T> RankValues(int rank, int64_t count, uint32_t seed) {
  std::vector<T> values(static_cast<size_t>(count));
  uint64_t state = (uint64_t{seed} << 32) + static_cast<uint64_t>(rank + 1) * 0x9e3779b97f4a7c15u;
  for (T& value : values) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const auto mantissa = static_cast<float>(static_cast<int32_t>(state >> 32));
    value = static_cast<T>(mantissa * kScales[(state >> 24) % std::size(kScales)]);
  }
  return values;
}

// Sum over the ranks by the contract: float32, rank order, one rounding.
template <typename T>
std::vector<T> ExpectedSum(int size, int64_t count, uint32_t seed) {
  std::vector<float> sum(static_cast<size_t>(count));
  for (int rank = 0; rank < size; ++rank) {
    const std::vector<T> part = RankValues<T>(rank, count, seed);
    for (size_t i = 0; i < sum.size(); ++i) {
      sum[i] = rank == 0 ? static_cast<float>(part[i]) : sum[i] + static_cast<float>(part[i]);
    }
  }
  std::vector<T> rounded;
  for (float value : sum) rounded.push_back(static_cast<T>(value));
  return rounded;
}

// Device memory with a sentinel element at both ends.
template <typename T>
class DeviceValues {
 public:
  static absl::StatusOr<DeviceValues> Create(const std::vector<T>& values, const Stream& stream) {
    DeviceValues result;
    result.count_ = static_cast<int64_t>(values.size());
    std::vector<T> host(values.size() + 2);
    std::memset(static_cast<void*>(host.data()), kSentinel, host.size() * sizeof(T));
    std::copy(values.begin(), values.end(), host.begin() + 1);
    const auto bytes = static_cast<int64_t>(host.size() * sizeof(T));
    DFLASH_ASSIGN_OR_RETURN(result.buffer_, Buffer::Allocate(bytes, stream));
    DFLASH_RETURN_IF_ERROR(CopyToDevice(result.buffer_.data(), host.data(), bytes, stream));
    return result;
  }
  T* data() const { return buffer_.template As<T>() + 1; }

  // Internal unless the memory holds exactly these bits and the sentinels.
  absl::Status Expect(const std::vector<T>& expected, const std::string& what, const Stream& stream) const {
    std::vector<T> host(static_cast<size_t>(count_) + 2);
    DFLASH_RETURN_IF_ERROR(
        CopyToHost(host.data(), buffer_.data(), static_cast<int64_t>(host.size() * sizeof(T)), stream));
    T sentinel;
    std::memset(static_cast<void*>(&sentinel), kSentinel, sizeof(T));
    if (std::memcmp(&host.front(), &sentinel, sizeof(T)) != 0 ||
        std::memcmp(&host.back(), &sentinel, sizeof(T)) != 0)
      return absl::InternalError(absl::StrCat(what, " wrote outside its buffer"));
    for (size_t i = 0; i < expected.size(); ++i) {
      if (std::memcmp(&host[i + 1], &expected[i], sizeof(T)) != 0)
        return absl::InternalError(absl::StrCat(what, ": element ", i, " is ",
                                                static_cast<double>(host[i + 1]), " instead of ",
                                                static_cast<double>(expected[i])));
    }
    return absl::OkStatus();
  }

 private:
  static constexpr int kSentinel = 0x5b;
  Buffer buffer_;
  int64_t count_ = 0;
};

// All collectives once, `count` elements a rank.
template <typename T>
absl::Status CheckCollectives(Communicator& comm, const Stream& stream, int64_t count, uint32_t seed) {
  const int rank = comm.rank(), size = comm.size();
  const DType dtype = DTypeOf<T>::value;
  const auto bytes = count * static_cast<int64_t>(sizeof(T));
  const std::string where = absl::StrCat(" of ", count, " ", Name(dtype), " on rank ", rank, " of ", size);

  DFLASH_ASSIGN_OR_RETURN(auto reduced, DeviceValues<T>::Create(RankValues<T>(rank, count, seed), stream));
  DFLASH_RETURN_IF_ERROR(comm.AllReduce(reduced.data(), count, dtype, stream));
  DFLASH_RETURN_IF_ERROR(reduced.Expect(ExpectedSum<T>(size, count, seed), "AllReduce" + where, stream));

  std::vector<T> gathered;
  for (int r = 0; r < size; ++r) {
    const std::vector<T> part = RankValues<T>(r, count, seed + 1);
    gathered.insert(gathered.end(), part.begin(), part.end());
  }
  DFLASH_ASSIGN_OR_RETURN(auto send, DeviceValues<T>::Create(RankValues<T>(rank, count, seed + 1), stream));
  DFLASH_ASSIGN_OR_RETURN(auto receive, DeviceValues<T>::Create(std::vector<T>(gathered.size()), stream));
  DFLASH_RETURN_IF_ERROR(comm.AllGather(send.data(), receive.data(), bytes, stream));
  DFLASH_RETURN_IF_ERROR(receive.Expect(gathered, "AllGather" + where, stream));
  // In place: this rank's part is where it belongs already.
  std::vector<T> own(gathered.size());
  std::copy_n(gathered.begin() + rank * count, count, own.begin() + rank * count);
  DFLASH_ASSIGN_OR_RETURN(auto in_place, DeviceValues<T>::Create(own, stream));
  DFLASH_RETURN_IF_ERROR(comm.AllGather(in_place.data() + rank * count, in_place.data(), bytes, stream));
  DFLASH_RETURN_IF_ERROR(in_place.Expect(gathered, "AllGather in place" + where, stream));

  const std::vector<T> all_sums = ExpectedSum<T>(size, size * count, seed + 2);
  const std::vector<T> my_sum(all_sums.begin() + rank * count, all_sums.begin() + (rank + 1) * count);
  const std::vector<T> to_scatter = RankValues<T>(rank, size * count, seed + 2);
  DFLASH_ASSIGN_OR_RETURN(auto scatter, DeviceValues<T>::Create(to_scatter, stream));
  DFLASH_ASSIGN_OR_RETURN(auto mine,
                          DeviceValues<T>::Create(std::vector<T>(static_cast<size_t>(count)), stream));
  DFLASH_RETURN_IF_ERROR(comm.ReduceScatter(scatter.data(), mine.data(), count, dtype, stream));
  DFLASH_RETURN_IF_ERROR(mine.Expect(my_sum, "ReduceScatter" + where, stream));
  DFLASH_RETURN_IF_ERROR(scatter.Expect(to_scatter, "the input of ReduceScatter" + where, stream));
  DFLASH_RETURN_IF_ERROR(
      comm.ReduceScatter(scatter.data(), scatter.data() + rank * count, count, dtype, stream));
  std::vector<T> scattered = to_scatter;
  std::copy(my_sum.begin(), my_sum.end(), scattered.begin() + rank * count);
  DFLASH_RETURN_IF_ERROR(scatter.Expect(scattered, "ReduceScatter in place" + where, stream));

  for (int root = 0; root < size; ++root) {
    const auto at = seed + 3 + static_cast<uint32_t>(root);
    DFLASH_ASSIGN_OR_RETURN(auto data, DeviceValues<T>::Create(RankValues<T>(rank, count, at), stream));
    DFLASH_RETURN_IF_ERROR(comm.Broadcast(data.data(), bytes, root, stream));
    DFLASH_RETURN_IF_ERROR(
        data.Expect(RankValues<T>(root, count, at), absl::StrCat("Broadcast from ", root, where), stream));
  }
  return comm.Barrier(stream);
}

inline absl::Status CheckCommunicator(Communicator& comm, const Stream& stream) {
  uint32_t seed = 1;
  // Empty, one, around a tile of the sum, more than one slot of the host exchange.
  for (int64_t count : {0, 1, 7, 1024, 1025, 300001}) {
    DFLASH_RETURN_IF_ERROR(CheckCollectives<float>(comm, stream, count, seed));
    DFLASH_RETURN_IF_ERROR(CheckCollectives<bf16>(comm, stream, count, seed + 100));
    seed += 200;
  }
  return absl::OkStatus();
}

}  // namespace dflash::testing
