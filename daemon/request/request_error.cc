#include "daemon/request/request_error.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace dflash {
namespace {

constexpr char kFieldUrl[] = "dflashd/field";
constexpr char kRetryUrl[] = "dflashd/retry_after_ns";
constexpr char kMetadataPrefix[] = "dflashd/metadata/";

std::string ReasonOfCode(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kInvalidArgument:
      return "BAD_PARAMETER";
    case absl::StatusCode::kNotFound:
      return "MODEL_NOT_FOUND";
    case absl::StatusCode::kAlreadyExists:
      return "DUPLICATE_REQUEST";
    case absl::StatusCode::kUnimplemented:
      return "UNSUPPORTED";
    case absl::StatusCode::kFailedPrecondition:
      return "METHOD_NOT_LOADED";
    case absl::StatusCode::kResourceExhausted:
      return "QUEUE_FULL";
    case absl::StatusCode::kUnauthenticated:
      return "UNAUTHENTICATED";
    case absl::StatusCode::kPermissionDenied:
      return "PERMISSION_DENIED";
    case absl::StatusCode::kAborted:
      return "REVISION_MISMATCH";
    case absl::StatusCode::kUnavailable:
      return "NOT_READY";
    case absl::StatusCode::kDeadlineExceeded:
      return "DEADLINE";
    case absl::StatusCode::kCancelled:
      return "CANCELLED";
    default:
      return "BUG";
  }
}

}  // namespace

absl::Status WithDetails(absl::Status status, const ErrorDetails& details) {
  if (status.ok()) return status;
  absl::Status result(status.code(), status.message());
  result.SetPayload(kReasonPayload, absl::Cord(details.reason));
  if (!details.field.empty()) result.SetPayload(kFieldUrl, absl::Cord(details.field));
  if (details.retry_after.has_value()) {
    const std::string ns = absl::StrCat(absl::ToInt64Nanoseconds(*details.retry_after));
    result.SetPayload(kRetryUrl, absl::Cord(ns));
  }
  for (const auto& [key, value] : details.metadata) {
    result.SetPayload(absl::StrCat(kMetadataPrefix, key), absl::Cord(value));
  }
  return result;
}

ErrorDetails DetailsOf(const absl::Status& status) {
  ErrorDetails details;
  details.reason = ReasonOfCode(status.code());
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    const std::string value(payload);
    const std::string key(url);
    if (key == kReasonPayload) details.reason = value;
    if (key == kFieldUrl) details.field = value;
    if (key == kRetryUrl) details.retry_after = absl::Nanoseconds(std::stoll(value));
    if (key.rfind(kMetadataPrefix, 0) == 0) {
      details.metadata.emplace_back(key.substr(sizeof(kMetadataPrefix) - 1), value);
    }
  });
  return details;
}

absl::Status BadParameter(const std::string& field, const std::string& text) {
  return WithDetails(absl::InvalidArgumentError(absl::StrCat(field, ": ", text)),
                     {.reason = "BAD_PARAMETER", .field = field, .retry_after = {}, .metadata = {}});
}

absl::Status NotInThisBuild(const std::string& field, const std::string& what) {
  return WithDetails(absl::UnimplementedError(absl::StrCat(field, field.empty() ? "" : ": ", what,
                                                           what.empty() ? "" : ": ", "not in this build")),
                     {.reason = "UNSUPPORTED", .field = field, .retry_after = {}, .metadata = {}});
}

}  // namespace dflash
