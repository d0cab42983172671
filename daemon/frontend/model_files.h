// What the coordinator's own model folders say which model they belong to.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "base/model_identity.h"

namespace dflash {

// Digests of config.json and of the tokenizer's files; without revisions, since the weights need not be here.
// `draft_model` may be empty; a folder without config.json says nothing of it. Errors of reading the files.
absl::StatusOr<ModelIdentity> IdentityOfFiles(const std::string& model, const std::string& draft_model);

}  // namespace dflash
