#include "daemon/rpc/public_server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace dflash {
namespace {

constexpr int kMaxMessageBytes = 8 << 20;
constexpr char kInferenceService[] = "dflash.v1.InferenceService";

}  // namespace

class PublicServer::Impl {
 public:
  std::unique_ptr<grpc::Server> server;
  int port = 0;
};

PublicServer::PublicServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PublicServer::~PublicServer() { Shutdown(absl::ZeroDuration()); }

absl::StatusOr<std::unique_ptr<PublicServer>> PublicServer::Start(const std::string& address,
                                                                  InferenceService* service) {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  auto impl = std::make_unique<Impl>();
  grpc::ServerBuilder builder;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &impl->port);
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // Finds clients that vanished without a word, and lets eager ones ping.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 30000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10000);
  builder.RegisterService(service->service());
  impl->server = builder.BuildAndStart();
  if (impl->server == nullptr) return absl::UnavailableError(absl::StrCat("cannot listen on ", address));
  impl->server->GetHealthCheckService()->SetServingStatus("", true);
  auto server = std::unique_ptr<PublicServer>(new PublicServer(std::move(impl)));
  server->SetServing(false);
  return server;
}

int PublicServer::port() const { return impl_->port; }

void PublicServer::SetServing(bool serving) {
  impl_->server->GetHealthCheckService()->SetServingStatus(kInferenceService, serving);
}

void PublicServer::Shutdown(absl::Duration timeout) {
  impl_->server->Shutdown(absl::ToChronoTime(absl::Now() + timeout));
  impl_->server->Wait();
}

}  // namespace dflash
