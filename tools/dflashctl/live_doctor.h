// The doctor of a running server: what can be said from outside, through the public API.
#pragma once

#include <cstdint>

#include "tools/dflashctl/connection.h"
#include "tools/doctor/golden_bundle.h"
#include "tools/doctor/report.h"

namespace dflash::ctl {

// Compares the server with the bundle: feature contract, tokens, rendered chats, text and acceptance of at
// most `max_prompts` prompts, alone, again and together, sampled with and without drafts. Interfaces that
// need tensors stay unchecked: those are for the doctor of a pair. Returns the server's error, if a call
// failed.
grpc::Status ExamineServer(Connection& connection, const doctor::GoldenBundle& bundle, int64_t max_prompts,
                           doctor::Report* report);

// The fields of a feature contract line that differ from the bundle's literals: "taps=0,2,4 instead of
// taps=1,3,5; ...". Revisions are left out.
std::string ContractDifferences(const std::string& line, const doctor::ExpectedContract& expected);

}  // namespace dflash::ctl
