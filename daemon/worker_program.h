// Which worker program runs, and with which command lines.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/settings.h"

namespace dflash {

// NotFound: no worker program. Unavailable: no device for --backend cuda.
absl::StatusOr<std::filesystem::path> ChooseWorker(const Settings& settings);

// One command a rank. Rank r of group g has device g * tp + r, unless all share one.
std::vector<std::vector<std::string>> WorkerCommands(const std::filesystem::path& worker,
                                                     const Settings& settings, int64_t group);

}  // namespace dflash
