// Status plumbing shared by every module: early-return macros and gtest-free helpers.
// absl::Status crosses module borders; exceptions never do (docs/ARCHITECTURE.md, "Errors").
#pragma once

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

// Returns from the enclosing function when `expr` is not OK.
#define DFLASH_RETURN_IF_ERROR(expr)                                  \
  do {                                                                \
    if (absl::Status status_ = (expr); !status_.ok()) return status_; \
  } while (false)

#define DFLASH_CONCAT_INNER(a, b) a##b
#define DFLASH_CONCAT(a, b) DFLASH_CONCAT_INNER(a, b)
#define DFLASH_ASSIGN_OR_RETURN_IMPL(result, lhs, expr) \
  auto result = (expr);                                 \
  if (!result.ok()) return result.status();             \
  lhs = std::move(result).value()

// Assigns the value of a StatusOr or returns its error.
#define DFLASH_ASSIGN_OR_RETURN(lhs, expr) \
  DFLASH_ASSIGN_OR_RETURN_IMPL(DFLASH_CONCAT(status_or_, __LINE__), lhs, expr)

namespace dflash {

// Prefixes the message of a failed status with where it happened; code and payloads stay. OK stays OK.
inline absl::Status Annotate(const absl::Status& status, const std::string& where) {
  if (status.ok()) return status;
  absl::Status annotated(status.code(), absl::StrCat(where, ": ", status.message()));
  status.ForEachPayload(
      [&](absl::string_view type, const absl::Cord& payload) { annotated.SetPayload(type, payload); });
  return annotated;
}

// A machine-readable reason (proto/dflash/v1/inference.proto lists them) that travels with a status from
// where it arises to the client, across modules and processes.
inline constexpr char kReasonPayload[] = "dflashd/reason";

inline absl::Status WithReason(absl::Status status, const std::string& reason) {
  status.SetPayload(kReasonPayload, absl::Cord(reason));
  return status;
}

// "" when there is none.
inline std::string ReasonOf(const absl::Status& status) {
  const auto reason = status.GetPayload(kReasonPayload);
  return reason.has_value() ? std::string(*reason) : std::string();
}

}  // namespace dflash
