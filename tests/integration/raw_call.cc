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

}  // namespace

RawAnswer RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                  const std::string& bytes) {
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
  const auto call = stub.PrepareCall(&context, "/dflash.v1.InferenceService/" + method, &queue);
  RawAnswer answer;
  call->StartCall(nullptr);
  bool ok = Await(queue);
  if (ok) {
    const grpc::Slice slice(bytes);
    call->Write(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions().set_last_message(), nullptr);
    (void)Await(queue);  // a server that has answered already takes nothing more
    for (grpc::ByteBuffer message;;) {
      call->Read(&message, nullptr);
      if (!Await(queue)) break;
      ++answer.messages;
    }
  }
  call->Finish(&answer.status, nullptr);
  (void)Await(queue);
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

}  // namespace dflash::integration
