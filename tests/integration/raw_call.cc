#include "tests/integration/raw_call.h"

#include "absl/time/clock.h"
#include "base/check.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/generic/generic_stub.h"
#include "tests/integration/process.h"

namespace dflash::integration {
namespace {

// Waits for the one operation under way.
bool Await(grpc::CompletionQueue& queue) {
  void* tag = nullptr;
  bool ok = false;
  DFLASH_CHECK(queue.Next(&tag, &ok));
  return ok;
}

// Calls with one message, reads to the end; returns how many came.
int CallAndRead(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                const grpc::ByteBuffer& message, const std::pair<std::string, std::string>& metadata,
                grpc::Status* status) {
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
  if (!metadata.first.empty()) context.AddMetadata(metadata.first, metadata.second);
  const auto call = stub.PrepareCall(&context, method, &queue);
  int messages = 0;
  call->StartCall(nullptr);
  if (Await(queue)) {
    call->Write(message, grpc::WriteOptions().set_last_message(), nullptr);
    (void)Await(queue);  // a server that has answered already takes nothing more
    for (grpc::ByteBuffer answer;;) {
      call->Read(&answer, nullptr);
      if (!Await(queue)) break;
      ++messages;
    }
  }
  call->Finish(status, nullptr);
  (void)Await(queue);
  return messages;
}

}  // namespace

RawAnswer RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                  const std::string& bytes) {
  RawAnswer answer;
  const grpc::Slice slice(bytes);
  answer.messages = CallAndRead(channel, "/dflash.v1.InferenceService/" + method, grpc::ByteBuffer(&slice, 1),
                                {}, &answer.status);
  google::rpc::Status details;
  if (!details.ParseFromString(answer.status.error_details())) return answer;
  for (const google::protobuf::Any& detail : details.details()) {
    google::rpc::ErrorInfo info;
    google::rpc::BadRequest bad;
    if (detail.Is<google::rpc::ErrorInfo>() && detail.UnpackTo(&info)) answer.reason = info.reason();
    if (detail.Is<google::rpc::BadRequest>() && detail.UnpackTo(&bad))
      answer.field = bad.field_violations(0).field();
  }
  return answer;
}

grpc::Status CallEmpty(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                       const std::pair<std::string, std::string>& metadata) {
  grpc::Status status;
  (void)CallAndRead(channel, method, grpc::ByteBuffer(nullptr, 0), metadata, &status);
  return status;
}

}  // namespace dflash::integration
