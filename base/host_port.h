// Network addresses in flags. Text only: nothing is resolved.
#pragma once

#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace dflash {

// "127.0.0.1:8500", "[::1]:0", "localhost:80" -> host (without brackets) and port. InvalidArgument: no host,
// no port, or one outside 0 to 65535.
absl::StatusOr<std::pair<std::string, int>> SplitHostPort(const std::string& address);

}  // namespace dflash
