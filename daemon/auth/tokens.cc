#include "daemon/auth/tokens.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <algorithm>
#include <optional>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "daemon/request/request_error.h"

namespace dflash {
namespace {

constexpr size_t kMaxNameBytes = 64;
constexpr Role kRoles[] = {Role::kInference, Role::kAdmin, Role::kMetrics};

// The next word of `line`, which is cut off; empty at the end.
std::string_view TakeWord(std::string_view* line) {
  constexpr std::string_view kSpace = " \t\r";
  line->remove_prefix(std::min(line->find_first_not_of(kSpace), line->size()));
  const std::string_view word = line->substr(0, line->find_first_of(kSpace));
  line->remove_prefix(word.size());
  return word;
}

std::optional<uint8_t> HexDigit(char c) {
  if (c >= '0' && c <= '9') return static_cast<uint8_t>(c - '0');
  if (c >= 'a' && c <= 'f') return static_cast<uint8_t>(c - 'a' + 10);
  if (c >= 'A' && c <= 'F') return static_cast<uint8_t>(c - 'A' + 10);
  return std::nullopt;
}

absl::Status Refusal(absl::Status status, const char* reason) {
  return WithDetails(std::move(status), {.reason = reason, .field = "", .retry_after = {}, .metadata = {}});
}

}  // namespace

const char* Name(Role role) {
  switch (role) {
    case Role::kInference:
      return "inference";
    case Role::kAdmin:
      return "admin";
    case Role::kMetrics:
      return "metrics";
  }
  return "";
}

Tokens::Hash Tokens::HashOf(std::string_view token) {
  Hash hash;
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), hash.data());
  return hash;
}

absl::StatusOr<Tokens::Entry> Tokens::ParseLine(std::string_view line) {
  Entry entry;
  const std::string_view name = TakeWord(&line);
  const bool legal = std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  });
  if (name.size() > kMaxNameBytes || !legal) {
    return absl::InvalidArgumentError("the name must have 1 to 64 characters of A-Z a-z 0-9 . _ -");
  }
  entry.name = std::string(name);

  constexpr std::string_view kAlgorithm = "sha256:";
  std::string_view hash = TakeWord(&line);
  if (!hash.starts_with(kAlgorithm) || hash.size() != kAlgorithm.size() + 2 * entry.hash.size()) {
    return absl::InvalidArgumentError("behind the name must stand sha256: and 64 hexadecimal digits");
  }
  hash.remove_prefix(kAlgorithm.size());
  for (size_t i = 0; i < entry.hash.size(); ++i) {
    const auto high = HexDigit(hash[2 * i]), low = HexDigit(hash[2 * i + 1]);
    if (!high || !low)
      return absl::InvalidArgumentError("the hash has a character that is no hexadecimal digit");
    entry.hash[i] = static_cast<uint8_t>(*high << 4 | *low);
  }

  std::string_view roles = TakeWord(&line);
  for (bool more = true; more;) {
    const size_t comma = std::min(roles.find(','), roles.size());
    const std::string_view word = roles.substr(0, comma);
    more = comma < roles.size();
    roles.remove_prefix(std::min(comma + 1, roles.size()));
    const auto role =
        std::find_if(std::begin(kRoles), std::end(kRoles), [&](Role known) { return word == Name(known); });
    if (role == std::end(kRoles)) {
      return absl::InvalidArgumentError(
          "behind the hash must stand roles: inference, admin, metrics, with commas");
    }
    entry.roles |= static_cast<uint8_t>(*role);
  }

  constexpr std::string_view kExpires = "expires=";
  std::string_view expires = TakeWord(&line);
  if (!expires.empty()) {
    std::string error;
    if (!expires.starts_with(kExpires) ||
        !absl::ParseTime(absl::RFC3339_full, std::string(expires.substr(kExpires.size())), &entry.expires,
                         &error)) {
      return absl::InvalidArgumentError(
          "behind the roles may only stand expires= and a time like 2027-01-31T00:00:00Z");
    }
  }
  if (!TakeWord(&line).empty())
    return absl::InvalidArgumentError("something follows the end of the line's fields");
  return entry;
}

absl::StatusOr<Tokens> Tokens::Parse(std::string_view text, std::string_view origin) {
  Tokens tokens;
  std::set<Hash> seen;
  for (int number = 1; !text.empty(); ++number) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    line = line.substr(0, line.find('#'));
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    absl::StatusOr<Entry> entry = ParseLine(line);
    if (entry.ok() && !seen.insert(entry->hash).second) {
      entry = absl::InvalidArgumentError("the hash stands in another line too");
    }
    if (entry.ok() && tokens.entries_.size() == kMaxTokens) {
      entry = absl::InvalidArgumentError(absl::StrCat("there are more than ", kMaxTokens, " tokens"));
    }
    if (!entry.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(std::string(origin), ":", number, ": ", entry.status().message()));
    }
    tokens.entries_.push_back(*std::move(entry));
  }
  return tokens;
}

absl::StatusOr<std::string> Tokens::Check(std::string_view authorization, Role role, absl::Time now) const {
  constexpr std::string_view kScheme = "bearer";  // in any case (RFC 9110, 11.1), and one space
  const bool has_scheme = authorization.size() > kScheme.size() && authorization[kScheme.size()] == ' ' &&
                          absl::EqualsIgnoreCase({authorization.data(), kScheme.size()}, kScheme.data());
  const Hash hash = HashOf(has_scheme ? authorization.substr(kScheme.size() + 1) : authorization);
  const Entry* found = nullptr;
  for (const Entry& entry : entries_) {  // all of them, whether one fits or not
    if (CRYPTO_memcmp(entry.hash.data(), hash.data(), hash.size()) == 0) found = &entry;
  }
  if (!has_scheme || found == nullptr || found->expires <= now) {
    return Refusal(absl::UnauthenticatedError("a valid bearer token is needed"), "UNAUTHENTICATED");
  }
  if ((found->roles & static_cast<uint8_t>(role)) == 0) {
    return Refusal(absl::PermissionDeniedError(absl::StrCat("the token does not have the role ", Name(role))),
                   "PERMISSION_DENIED");
  }
  return found->name;
}

}  // namespace dflash
