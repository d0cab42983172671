#include "tools/dflashctl/golden_record.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tools/dflashctl/block_cuts.h"
#include "tools/dflashctl/greedy_request.h"
#include "tools/dflashctl/live_doctor.h"

namespace dflash::ctl {
namespace {

using golden::GoldenPrompt;
using golden::RecordedBundle;

// All groups of a server have the same weights, or are none to record.
grpc::Status AddFingerprints(const Connection& connection, const Endpoint& admin, RecordedBundle* bundle) {
  v1::GetDiagnosisResponse diagnosis;
  if (const grpc::Status status = GetDiagnosis(connection, admin, &diagnosis); !status.ok()) return status;
  for (const v1::GroupDiagnosis& group : diagnosis.groups()) {
    for (const auto& [name, fingerprint] : group.fingerprints()) {
      auto& weights = name.starts_with("target ")    ? bundle->target_weights
                      : name.starts_with("drafter ") ? bundle->drafter_weights
                                                     : bundle->drafter_digests;
      const auto [entry, is_new] = weights.emplace(name.substr(name.rfind(' ') + 1), fingerprint);
      if (!is_new && entry->second != fingerprint)
        return grpc::Status(grpc::StatusCode::FAILED_PRECONDITION,
                            absl::StrCat("groups have different weights: ", name));
    }
  }
  return grpc::Status::OK;
}

}  // namespace

grpc::Status RecordServer(Connection& connection, const Endpoint* admin, const golden::GoldenBundle& from,
                          int64_t max_tokens, const std::string& out, int64_t* left_out, int64_t* cut) {
  v1::GetModelInfoResponse model;
  if (const grpc::Status status = connection.GetModelInfo(&model); !status.ok()) return status;
  if (!model.has_drafter())
    return grpc::Status(grpc::StatusCode::FAILED_PRECONDITION,
                        "the server drafts for nobody: nothing to record");
  const std::string differences = ContractDifferences(model.feature_contract(), from.contract());
  if (!differences.empty())
    return grpc::Status(
        grpc::StatusCode::FAILED_PRECONDITION,
        "the server reads its drafter otherwise than the bundle of the prompts: " + differences);
  if (const absl::Status fits = from.CheckFits({.vocabulary = model.vocabulary_size()}); !fits.ok())
    return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, std::string(fits.message()));

  RecordedBundle bundle;
  bundle.producer = absl::StrCat("a running server: ", model.model(), ", ", model.backend(), ", dflashd ",
                                 model.server_version());
  bundle.contract = from.contract();
  if (admin != nullptr) {
    if (const grpc::Status status = AddFingerprints(connection, *admin, &bundle); !status.ok()) return status;
  }
  *left_out = *cut = 0;
  BlockCuts cuts(model.drafter().block_size());
  for (const GoldenPrompt& prompt : from.prompts()) {
    if (static_cast<int64_t>(prompt.prompt_ids.size()) + max_tokens > model.max_context_tokens()) {
      ++*left_out;
      continue;
    }
    Generation generation;
    const grpc::Status status =
        connection.Generate(GreedyRequest(prompt.prompt_ids, max_tokens, v1::SPECULATION_MODE_DFLASH),
                            absl::InfiniteDuration(), nullptr, &generation);
    if (!status.ok()) return status;
    GoldenPrompt recorded = prompt;
    recorded.output_ids.assign(generation.token_ids.begin(), generation.token_ids.end());
    recorded.acceptance_lengths.clear();
    if (cuts.Add(generation, max_tokens)) {
      ++*cut;
    } else {
      for (const v1::StepInfo& round : generation.rounds)
        recorded.acceptance_lengths.push_back(int64_t{round.accepted()} + 1);
    }
    bundle.prompts.push_back(std::move(recorded));
  }
  if (bundle.prompts.empty())
    return grpc::Status(grpc::StatusCode::FAILED_PRECONDITION, "no prompt fits into the server's context");
  const absl::Status written = golden::WriteBundle(bundle, out);
  return written.ok()
             ? grpc::Status::OK
             : grpc::Status(static_cast<grpc::StatusCode>(written.code()), std::string(written.message()));
}

}  // namespace dflash::ctl
