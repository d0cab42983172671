// One call of the public API with any bytes in the place of its request.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "grpcpp/grpcpp.h"

namespace dflash::integration {

struct RawAnswer {
  grpc::Status status;
  int messages = 0;
  std::string reason;  // of the status's ErrorInfo; empty: it has none
  std::string field;   // of its BadRequest
};

// Calls /dflash.v1.InferenceService/METHOD and reads to the end.
RawAnswer RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                  const std::string& bytes);

// Calls "/package.Service/Method" with an empty message and reads what comes until the end. `metadata`: name
// and value; without a name none.
grpc::Status CallEmpty(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                       const std::pair<std::string, std::string>& metadata = {});

}  // namespace dflash::integration
