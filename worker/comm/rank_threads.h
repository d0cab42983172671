// The ranks of a group as threads of one process.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "worker/comm/communicator.h"

namespace dflash {

// Calls `work` for every rank on a thread of its own and waits for all. A rank that fails aborts its
// communicator, which ends the others' collectives. Returns the cause rather than what the others saw of it:
// the first error that is not Unavailable, else the first error.
absl::Status RunOnRanks(std::span<const std::unique_ptr<Communicator>> communicators,
                        const std::function<absl::Status(size_t rank)>& work);

}  // namespace dflash
