#include "tools/doctor/weights_scan.h"

#include <cstdint>
#include <cstring>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "base/sha256.h"
#include "base/status.h"

namespace dflash::doctor {
namespace {

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

// Of one tensor.
struct Seen {
  Sha256 hash;
  int64_t bad = 0, first_bad = 0;  // elements
};

}  // namespace

absl::StatusOr<WeightsScan> ScanWeights(const Checkpoint& checkpoint, bool with_digests) {
  std::map<std::string_view, Seen> seen;  // none is added while threads are at them
  for (const auto& [name, tensor] : checkpoint.tensors()) seen[name];
  DFLASH_RETURN_IF_ERROR(
      checkpoint.VisitAll([&](const TensorInfo& tensor, int64_t first_row, std::string_view bytes) {
        Seen& of_tensor = seen.find(tensor.name)->second;
        if (with_digests) of_tensor.hash.Append(bytes);
        const auto size = static_cast<size_t>(SizeOf(tensor.dtype));
        for (size_t i = 0; i < bytes.size() / size; ++i) {
          if (!IsNoNumber(bytes.data() + i * size, tensor.dtype)) continue;
          if (of_tensor.bad++ == 0) of_tensor.first_bad = first_row * tensor.cols() + static_cast<int64_t>(i);
        }
      }));
  WeightsScan scan;
  for (auto& [name, of_tensor] : seen) {
    if (with_digests) scan.digests.emplace(name, of_tensor.hash.HexDigest());
    if (of_tensor.bad == 0 || !scan.no_numbers.empty()) continue;
    const TensorInfo& tensor = checkpoint.Get(name);
    scan.no_numbers =
        absl::StrCat(tensor.name, ": ", of_tensor.bad, " of ", tensor.rows() * tensor.cols(),
                     " elements are no finite numbers, the first in row ",
                     of_tensor.first_bad / tensor.cols(), ", column ", of_tensor.first_bad % tensor.cols());
  }
  return scan;
}

}  // namespace dflash::doctor
