// A worker that dies of a request whose prompt has token kPoison, as one with a bug would that this input
// triggers. It is a leader's address in front of a real dflash-worker, which it starts with its own flags,
// and passes on what both sides say. Takes the flags of dflash-worker.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "base/child_process.h"
#include "dflash/worker/v1/worker.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "tests/integration/poisoned_worker.h"

namespace dflash::integration {
namespace {

namespace wire = worker::v1;

class PoisonedWorker final : public wire::WorkerService::Service {
 public:
  explicit PoisonedWorker(const std::string& behind) : stub_(wire::WorkerService::NewStub(Connect(behind))) {}

  grpc::Status GetGroupInfo(grpc::ServerContext*, const wire::GetGroupInfoRequest* request,
                            wire::GetGroupInfoResponse* response) override {
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    const grpc::Status status = stub_->GetGroupInfo(&context, *request, response);
    response->set_pid(getpid());
    return status;
  }
  grpc::Status Serve(grpc::ServerContext*,
                     grpc::ServerReaderWriter<wire::ServeResponse, wire::ServeRequest>* stream) override {
    grpc::ClientContext context;
    const auto behind = stub_->Serve(&context);
    std::thread requests([&] {
      for (wire::ServeRequest request; stream->Read(&request);) {
        const auto& prompt = request.submit().prompt_tokens();
        if (std::find(prompt.begin(), prompt.end(), kPoison) != prompt.end()) kill(getpid(), SIGKILL);
        if (!behind->Write(request)) break;
      }
      behind->WritesDone();
    });
    for (wire::ServeResponse response; behind->Read(&response);) {
      if (!stream->Write(response)) break;
    }
    // The worker has ended, or nobody listens: so do we, and with us what still reads.
    const grpc::Status status = behind->Finish();
    std::_Exit(status.ok() ? 0 : 1);
  }

 private:
  // A worker that loads its model does not listen yet.
  static std::shared_ptr<grpc::Channel> Connect(const std::string& address) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 20);
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 20);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 200);
    return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  }
  const std::unique_ptr<wire::WorkerService::Stub> stub_;
};

int Main(int argc, char** argv) {
  std::vector<std::string> command = {DFLASH_WORKER_PATH};
  std::string listen, behind;
  for (int i = 1; i < argc; ++i) {
    command.emplace_back(argv[i]);
    if (command.back() != "--listen" || i + 1 == argc) continue;
    listen = argv[++i];
    behind = listen + ".behind";
    command.push_back(behind);
  }
  auto worker = ChildProcess::Start(command, [](const ExitReport& report) { std::_Exit(report.code); });
  if (!worker.ok() || listen.empty()) return 1;
  PoisonedWorker service(behind);
  grpc::ServerBuilder builder;
  builder.AddListeningPort(listen, grpc::InsecureServerCredentials());
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) return 1;
  server->Wait();
  return 0;
}

}  // namespace
}  // namespace dflash::integration

int main(int argc, char** argv) { return dflash::integration::Main(argc, argv); }
