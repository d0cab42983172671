// Between plans and the messages of the rank channel; proofs of the group secret.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dflash/worker/v1/rank.pb.h"
#include "worker/rank/plan.h"

namespace dflash {

namespace wire = ::dflash::worker::v1;

wire::RankPlan ToMessage(const RankPlan& plan);
RankPlan FromMessage(const wire::RankPlan& message);

wire::Abort ToAbort(const absl::Status& status);
absl::Status FromAbort(const wire::Abort& message);

// 32 bytes that nobody can guess.
std::string RandomNonce();
// What "proof" means in rank.proto; the empty string without a secret.
std::string Proof(const std::string& secret, const std::string& purpose, const std::string& nonce,
                  const std::string& group_id, uint32_t rank, uint64_t epoch);
// In time that does not depend on where they differ.
bool SameProof(const std::string& a, const std::string& b);

}  // namespace dflash
