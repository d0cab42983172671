#include "worker/rpc/frame_reader.h"

#include "absl/strings/str_cat.h"

namespace dflash {

absl::StatusOr<std::optional<std::string>> FrameReader::Next() {
  const std::string_view left = std::string_view(buffer_).substr(consumed_);
  if (left.size() < kFrameHeaderBytes) return std::optional<std::string>();
  size_t size = 0;
  for (size_t i = 0; i < kFrameHeaderBytes; ++i)
    size |= size_t{static_cast<unsigned char>(left[i])} << (8 * i);
  if (size == 0 || size > limit_) {
    return absl::InvalidArgumentError(
        absl::StrCat("a frame of ", size, " bytes: must be in [1, ", limit_, "]"));
  }
  if (left.size() < kFrameHeaderBytes + size) return std::optional<std::string>();
  std::string frame(left.substr(kFrameHeaderBytes, size));
  consumed_ += kFrameHeaderBytes + size;
  if (consumed_ == buffer_.size() || consumed_ > (size_t{64} << 10)) {
    buffer_.erase(0, consumed_);
    consumed_ = 0;
  }
  return std::optional<std::string>(std::move(frame));
}

absl::StatusOr<std::string> MakeFrame(std::string_view body) {
  if (body.empty() || body.size() > kMaxFrameBytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a frame of ", body.size(), " bytes: must be in [1, ", kMaxFrameBytes, "]"));
  }
  std::string frame;
  frame.reserve(kFrameHeaderBytes + body.size());
  for (size_t i = 0; i < kFrameHeaderBytes; ++i)
    frame.push_back(static_cast<char>(body.size() >> (8 * i) & 255));
  frame.append(body);
  return frame;
}

}  // namespace dflash
