// Between the messages of dflash.v1 and the daemon's structs. Fields that this build does not implement are
// refused here, by name.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/frontend/stream_buffer.h"
#include "daemon/log/trace_context.h"
#include "daemon/metrics/request_metrics.h"
#include "daemon/request/client_request.h"
#include "daemon/request/group_request.h"
#include "dflash/v1/generation.pb.h"

namespace dflash {

// Takes over a request. Unimplemented, naming the field, for what is not built; InvalidArgument for an
// unknown enum value and for more messages, tools or calls than a chat may have, before they are copied.
// Values are not checked otherwise (daemon/frontend/prepare.h does that).
absl::StatusOr<ClientRequest> FromMessage(const v1::GenerateRequest& message);
absl::StatusOr<ChatPrompt> FromMessage(const v1::ChatPrompt& message);

// What a stream carries; unset fields take the defaults of generation.proto.
StreamBuffer::Options OutputOptionsOf(const v1::GenerateRequest& message);

// What the events of a stream need beside themselves.
struct StreamFacts {
  std::string request_id;
  std::string model;
  std::string client;
  TraceContext trace;
  GroupRequest request;                   // its prompt may be empty
  std::vector<uint32_t> client_stop_ids;  // the client's own: other stop tokens are the model's end tokens
  std::vector<RequestLabel> labels;
  std::string model_fingerprint;
  uint32_t n = 1;
  // Whether the output is taken apart, and the tools that it may call.
  bool parse = false;
  std::vector<std::string> tools_json;
};
v1::Started ToMessage(const StartedOutput& started, const StreamFacts& facts);
// Of choice `index`.
v1::Chunk ToMessage(const OutputChunk& chunk, uint32_t index = 0);
v1::Finished ToMessage(const FinishedOutput& finished, const StreamFacts& facts, int64_t cached_tokens,
                       const RequestTimeline& timeline, uint32_t index = 0);

}  // namespace dflash
