#include "daemon/rpc/grpc_status.h"

#include "daemon/request/request_error.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "text/utf8.h"

namespace dflash {
namespace {

// A status travels in the trailers, which clients take up to 8 KiB of: the text three times, with each byte
// that is not ASCII written as three. A template's own words may hold all of a message.
constexpr size_t kMaxMessageBytes = 1024;

std::string CutMessage(absl::string_view message) {
  if (message.size() <= kMaxMessageBytes) return std::string(message);
  std::string cut;
  AppendWellFormed(std::string_view(message.data(), kMaxMessageBytes - 3), cut);
  return cut + "...";
}

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const ErrorDetails details = DetailsOf(status);
  google::rpc::Status message;
  message.set_code(static_cast<int>(status.code()));
  const std::string text = CutMessage(status.message());
  message.set_message(text);
  google::rpc::ErrorInfo info;
  info.set_domain("dflashd");
  info.set_reason(details.reason);
  for (const auto& [key, value] : details.metadata) (*info.mutable_metadata())[key] = value;
  message.add_details()->PackFrom(info);
  if (!details.field.empty()) {
    google::rpc::BadRequest bad;
    google::rpc::BadRequest::FieldViolation* violation = bad.add_field_violations();
    violation->set_field(details.field);
    violation->set_description(text);
    message.add_details()->PackFrom(bad);
  }
  if (details.retry_after.has_value()) {
    google::rpc::RetryInfo retry;
    const int64_t ns = absl::ToInt64Nanoseconds(*details.retry_after);
    retry.mutable_retry_delay()->set_seconds(ns / 1'000'000'000);
    retry.mutable_retry_delay()->set_nanos(static_cast<int32_t>(ns % 1'000'000'000));
    message.add_details()->PackFrom(retry);
  }
  // absl and gRPC codes have equal numbers.
  return {static_cast<grpc::StatusCode>(status.code()), text, message.SerializeAsString()};
}

}  // namespace dflash
