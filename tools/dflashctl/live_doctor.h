// The doctor of a running server: what can be said from outside, through the public API, and what the server
// says about itself on its operators' port.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/dtype.h"
#include "dflash/v1/admin.pb.h"
#include "tools/dflashctl/connection.h"
#include "tools/doctor/report.h"
#include "worker/golden/golden_bundle.h"

namespace dflash::ctl {

// Compares the server with the bundle: feature contract, tokens, rendered chats, text and acceptance of at
// most `max_prompts` prompts, alone, again and together, sampled with and without drafts, and their rounds
// with the same tokens as a prompt. Accepted drafts of blocks that were cut (block_cuts.h) are compared with
// nothing. Interfaces that need tensors stay unchecked: those are for the doctor of a pair. With `admin`, the
// operators' port, the server's own diagnosis counts, too (ExamineDiagnosis). Returns the server's error, if
// a call failed.
grpc::Status ExamineServer(Connection& connection, const Endpoint* admin, const golden::GoldenBundle& bundle,
                           int64_t max_prompts, doctor::Report* report);

// Of a server's backend, as GetModelInfo names it.
DType ActivationsOf(std::string_view backend);

// What a running server says about itself on its operators' port. An error names the port.
grpc::Status GetDiagnosis(const Connection& connection, const Endpoint& admin,
                          v1::GetDiagnosisResponse* diagnosis);

// What a running server says about itself through AdminService, held against the bundle: files, revisions,
// contract, coverage, counters and the verdict on its rounds. `before` and `after` the prompts of
// ExamineServer, which had `own_rounds` rounds with drafts.
void ExamineDiagnosis(const v1::GetDiagnosisResponse& before, const v1::GetDiagnosisResponse& after,
                      uint64_t own_rounds, const golden::GoldenBundle& bundle, doctor::Report* report);

// The fields of a feature contract line that differ from the bundle's literals: "taps=0,2,4 instead of
// taps=1,3,5; ...". Revisions are left out.
std::string ContractDifferences(const std::string& line, const golden::ExpectedContract& expected);

}  // namespace dflash::ctl
