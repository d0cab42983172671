// From absl::Status to what goes over the wire.
#pragma once

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace dflash {

// The same code, the message (cut to 1024 bytes, which trailers have room for) and the details of
// DetailsOf(status) as google.rpc.Status: ErrorInfo always, BadRequest when there is a field, RetryInfo when
// there is a hint.
grpc::Status ToGrpcStatus(const absl::Status& status);

}  // namespace dflash
