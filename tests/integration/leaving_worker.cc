// A worker that answers what it is, ends its stream at the first heartbeat, and goes on living: what the
// coordinator must not leave behind. Takes the flags of dflash-worker and looks at --listen only.
#include <unistd.h>

#include <string_view>

#include "dflash/worker/v1/worker.grpc.pb.h"
#include "grpcpp/grpcpp.h"

namespace dflash {
namespace {

class LeavingWorker final : public worker::v1::WorkerService::Service {
 public:
  grpc::Status GetGroupInfo(grpc::ServerContext*, const worker::v1::GetGroupInfoRequest* request,
                            worker::v1::GetGroupInfoResponse* response) override {
    response->set_build(request->build());
    response->set_pid(getpid());
    response->set_vocabulary_size(4096);
    response->set_max_context_tokens(4096);
    response->set_max_sequences(1);
    return grpc::Status::OK;
  }
  grpc::Status Serve(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<worker::v1::ServeResponse, worker::v1::ServeRequest>* stream) override {
    worker::v1::ServeRequest message;
    (void)stream->Read(&message);
    return grpc::Status::OK;
  }
};

}  // namespace
}  // namespace dflash

int main(int argc, char** argv) {
  dflash::LeavingWorker service;
  grpc::ServerBuilder builder;
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::string_view(argv[i]) == "--listen") {
      builder.AddListeningPort(argv[i + 1], grpc::InsecureServerCredentials());
    }
  }
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) return 1;
  server->Wait();
}
