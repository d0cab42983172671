#include "tools/doctor/weights_scan.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/host_limits.h"
#include "base/status.h"

namespace dflash::doctor {
namespace {

constexpr int64_t kBlockBytes = int64_t{8} << 20;

// Exponents of all ones: infinities and NaNs.
bool IsNoNumber(const char* element, DType dtype) {
  if (dtype == DType::kBf16) {
    uint16_t bits = 0;
    std::memcpy(&bits, element, sizeof(bits));
    return (bits & 0x7f80) == 0x7f80;
  }
  uint32_t bits = 0;
  std::memcpy(&bits, element, sizeof(bits));
  return (bits & 0x7f800000) == 0x7f800000;
}

absl::StatusOr<std::string> Scan(const Checkpoint& checkpoint, const TensorInfo& tensor) {
  const auto size = static_cast<int64_t>(SizeOf(tensor.dtype));
  const int64_t rows = std::max<int64_t>(1, kBlockBytes / (tensor.cols() * size));
  std::vector<char> bytes;
  int64_t bad = 0, first_bad = 0;
  for (int64_t first = 0; first < tensor.rows(); first += rows) {
    const int64_t count = std::min(rows, tensor.rows() - first);
    bytes.resize(static_cast<size_t>(count * tensor.cols() * size));
    DFLASH_RETURN_IF_ERROR(checkpoint.ReadInto(tensor, tensor.Rows(first, count), bytes.data(),
                                               static_cast<int64_t>(bytes.size())));
    for (int64_t i = 0; i < count * tensor.cols(); ++i) {
      if (!IsNoNumber(bytes.data() + i * size, tensor.dtype)) continue;
      if (bad++ == 0) first_bad = first * tensor.cols() + i;
    }
  }
  if (bad == 0) return std::string();
  return absl::StrCat(tensor.name, ": ", bad, " of ", tensor.rows() * tensor.cols(),
                      " elements are no finite numbers, the first in row ", first_bad / tensor.cols(),
                      ", column ", first_bad % tensor.cols());
}

}  // namespace

absl::StatusOr<std::string> FindNoNumbers(const Checkpoint& checkpoint) {
  std::vector<const TensorInfo*> tensors;
  for (const auto& [name, tensor] : checkpoint.tensors()) tensors.push_back(&tensor);
  std::vector<absl::StatusOr<std::string>> found(tensors.size(), std::string());
  std::atomic<size_t> next = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < std::min(AvailableCores(), 16); ++i) {
    threads.emplace_back([&] {
      for (size_t t = next++; t < tensors.size(); t = next++) found[t] = Scan(checkpoint, *tensors[t]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::StatusOr<std::string>& of_tensor : found) {
    if (!of_tensor.ok() || !of_tensor->empty()) return of_tensor;
  }
  return std::string();
}

}  // namespace dflash::doctor
