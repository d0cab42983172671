#include "base/host_port.h"

#include <charconv>

#include "absl/strings/str_cat.h"

namespace dflash {

absl::StatusOr<std::pair<std::string, int>> SplitHostPort(const std::string& address) {
  const size_t colon = address.rfind(':');
  std::string host = address.substr(0, colon);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  int port = -1;
  if (colon != std::string::npos && !host.empty()) {
    const char* end = address.data() + address.size();
    const auto [parsed_to, error] = std::from_chars(address.data() + colon + 1, end, port);
    if (error != std::errc() || parsed_to != end) port = -1;
  }
  if (port < 0 || port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat("\"", address, "\" is no HOST:PORT"));
  }
  return std::pair(host, port);
}

}  // namespace dflash
