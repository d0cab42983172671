// Cuts a stream of bytes into frames: four bytes, little endian, the size of what follows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace dflash {

inline constexpr size_t kMaxFrameBytes = size_t{16} << 20;
inline constexpr size_t kFrameHeaderBytes = 4;

// Takes bytes as they come, in any pieces. Holds no more than has arrived.
class FrameReader {
 public:
  void Append(std::string_view bytes) { buffer_.append(bytes); }
  // Longest frame from now on; kMaxFrameBytes at the beginning.
  void set_limit(size_t bytes) { limit_ = bytes; }
  // The next whole frame without its header; nullopt when more bytes are needed. InvalidArgument: the size is
  // 0 or above the limit; nothing after it can be read.
  absl::StatusOr<std::optional<std::string>> Next();

 private:
  std::string buffer_;
  size_t consumed_ = 0;
  size_t limit_ = kMaxFrameBytes;
};

// Header and body. ResourceExhausted when the body is empty or too large.
absl::StatusOr<std::string> MakeFrame(std::string_view body);

}  // namespace dflash
