// Bearer tokens and what they allow. A token file holds one token a line, hashed:
//
//   NAME sha256:HEX ROLE[,ROLE...] [expires=RFC3339]      # comment
//
// NAME has 1 to 64 characters of [A-Za-z0-9._-] and is what logs and limits call the client; it may stand in
// several lines, so that a token can be replaced while the old one still works. HEX is SHA-256 of the token's
// bytes (`printf %s "$TOKEN" | sha256sum`). Tokens must be long random strings: a plain hash protects no
// others.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace dflash {

enum class Role : uint8_t { kInference = 1, kAdmin = 2, kMetrics = 4 };
const char* Name(Role role);  // "inference", "admin", "metrics"

class Tokens {
 public:
  static constexpr int64_t kMaxFileBytes = 1 << 20;
  static constexpr size_t kMaxTokens = 10'000;

  // Reads the text of a token file. InvalidArgument names `origin` and line, never a hash: a line that is not
  // as above, the same hash twice, more than kMaxTokens.
  static absl::StatusOr<Tokens> Parse(std::string_view text, std::string_view origin);

  // `authorization` is the header or metadata of that name. Returns the token's name. Unauthenticated: it is
  // not "Bearer TOKEN" with a known token that has not expired; what exactly is wrong is not said.
  // PermissionDenied: the token lacks the role. How long it takes depends on the number of tokens only.
  absl::StatusOr<std::string> Check(std::string_view authorization, Role role, absl::Time now) const;

  size_t size() const { return entries_.size(); }

 private:
  using Hash = std::array<uint8_t, 32>;
  struct Entry {
    std::string name;
    Hash hash{};
    uint8_t roles = 0;
    absl::Time expires = absl::InfiniteFuture();
  };
  static absl::StatusOr<Entry> ParseLine(std::string_view line);
  static Hash HashOf(std::string_view token);

  std::vector<Entry> entries_;
};

}  // namespace dflash
