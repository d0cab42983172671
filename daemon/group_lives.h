// How a worker group has fared, as metrics and probes show it.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/time/time.h"

namespace dflash {

struct GroupLives {
  uint64_t epoch = 0;  // counts the lives; of a group on another host, connections that served
  std::map<std::string, int64_t> reforms;  // lives that ended unasked, by cause
  absl::Duration heartbeat_age;
  bool given_up = false;  // for good: only a new process helps
};

}  // namespace dflash
