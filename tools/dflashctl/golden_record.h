// Golden bundles of a running server: tokens and acceptance, which is what its API shows. So a server that is
// trusted serves as a reference for another one.
#pragma once

#include <cstdint>
#include <string>

#include "tools/dflashctl/connection.h"
#include "worker/golden/golden_bundle.h"

namespace dflash::ctl {

// Generates the prompts of `from` one at a time and writes a bundle without tensors to the new folder `out`.
// Its contract is the one of `from`, which has to be the server's; its fingerprints are the server's own,
// asked for at `admin` (null: none). Prompts that do not fit into the server's context are left out,
// `left_out` of them; of those whose blocks the server cut, `cut` of them, the acceptance is. Errors: those
// of the calls; FailedPrecondition for a server that drafts for nobody or reads the drafter otherwise;
// AlreadyExists; Unavailable when the folder cannot be written.
grpc::Status RecordServer(Connection& connection, const Endpoint* admin, const golden::GoldenBundle& from,
                          int64_t max_tokens, const std::string& out, int64_t* left_out, int64_t* cut);

}  // namespace dflash::ctl
