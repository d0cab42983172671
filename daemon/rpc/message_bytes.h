// Between the bytes of a call and its message. The service takes its requests as bytes (gRPC's raw
// callbacks): what gRPC fails to parse by itself it answers with a bare UNIMPLEMENTED that no handler and no
// metric sees.
#pragma once

#include <string_view>

#include "absl/status/status.h"
#include "google/protobuf/message.h"
#include "grpcpp/support/byte_buffer.h"

namespace dflash {

// Replaces `message` by what the bytes say. InvalidArgument: a string that is not UTF-8, naming its field
// ("chat.messages[1].content"); bytes that are no message of this type, naming the type. Unimplemented: a
// field, at any depth, that this build's protos do not have (a newer client set it).
absl::Status ParseRequest(const grpc::ByteBuffer& bytes, google::protobuf::Message* message);
absl::Status ParseRequest(std::string_view bytes, google::protobuf::Message* message);

// The bytes of a message of ours.
grpc::ByteBuffer ToByteBuffer(const google::protobuf::Message& message);

}  // namespace dflash
