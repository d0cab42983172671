// The secret that the processes of a worker group share where they meet over a network.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace dflash {

inline constexpr int kShortestGroupSecret = 16;  // bytes

// The first line of a secret's file, which only its owner may read. Errors name the file; InvalidArgument: it
// is shorter than kShortestGroupSecret.
absl::StatusOr<std::string> ReadGroupSecret(const std::string& path);

// What a coordinator says to a leader to show that it knows the secret (proto/dflash/worker/v1/worker.proto).
inline constexpr char kGroupProofMetadata[] = "dflash-group-proof";
std::string CoordinatorProof(const std::string& secret);

}  // namespace dflash
