// Errors that reach a client: an absl::Status with a machine-readable reason, and where it helps the path of
// the request's field, a hint when to retry and further facts. daemon/rpc turns them into google.rpc details.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace dflash {

// What a status carries besides code and message.
struct ErrorDetails {
  std::string reason;  // "BAD_PARAMETER", ...: the list is in proto/dflash/v1/inference.proto
  std::string field;   // path in the request, may be empty
  std::optional<absl::Duration> retry_after;
  std::vector<std::pair<std::string, std::string>> metadata;
};

// Returns `status` with these details in place of any that it had. OK stays OK.
absl::Status WithDetails(absl::Status status, const ErrorDetails& details);
// The details of a status; when it has none, those that follow from its code ("BUG" for Internal, ...).
ErrorDetails DetailsOf(const absl::Status& status);

// InvalidArgument, reason BAD_PARAMETER: "FIELD: TEXT".
absl::Status BadParameter(const std::string& field, const std::string& text);
// Unimplemented, reason UNSUPPORTED: "FIELD: not in this build", "FIELD: WHAT: not in this build", or, of the
// request itself, whose path is empty, "WHAT: not in this build".
absl::Status NotInThisBuild(const std::string& field, const std::string& what = "");

}  // namespace dflash
