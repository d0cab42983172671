#include "daemon/rpc/public_server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <utility>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>

#include "absl/strings/str_cat.h"
#include "base/host_port.h"
#include "google/protobuf/stubs/logging.h"

namespace dflash {
namespace {

constexpr int kMaxMessageBytes = 8 << 20;
constexpr char kInferenceService[] = "dflash.v1.InferenceService";

// gRPC does not say why it could not listen: asks the system by doing it once more.
std::string WhyNotListening(const std::string& address) {
  namespace asio = boost::asio;
  const std::string text = absl::StrCat("cannot listen on ", address);
  const auto host_port = SplitHostPort(address);
  if (!host_port.ok()) return text;
  boost::system::error_code error;
  asio::io_context context;
  asio::ip::tcp::resolver resolver(context);
  const auto found = resolver.resolve(host_port->first, std::to_string(host_port->second),
                                      asio::ip::tcp::resolver::passive, error);
  if (error) return absl::StrCat(text, ": ", error.message());
  asio::ip::tcp::acceptor acceptor(context);
  acceptor.open(found.begin()->endpoint().protocol(), error);
  if (!error) acceptor.set_option(asio::socket_base::reuse_address(true), error);
  if (!error) acceptor.bind(found.begin()->endpoint(), error);
  if (!error) acceptor.listen(1, error);
  return error ? absl::StrCat(text, ": ", error.message()) : text;
}

}  // namespace

class PublicServer::Impl {
 public:
  std::unique_ptr<grpc::Server> server;
  int port = 0;
};

PublicServer::PublicServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PublicServer::~PublicServer() {
  impl_->server->Shutdown(absl::ToChronoTime(absl::Now()));
  impl_->server->Wait();
}

absl::StatusOr<std::unique_ptr<PublicServer>> PublicServer::Start(
    const std::string& address, InferenceService* service,
    std::shared_ptr<grpc::ServerCredentials> credentials, const ReflectionPolicy& reflection) {
  // Clients hear about text that is not UTF-8 (message_bytes.h); a line of the log for each would be theirs
  // to write.
  google::protobuf::SetLogHandler(nullptr);
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  auto impl = std::make_unique<Impl>();
  grpc::ServerBuilder builder;
  builder.AddListeningPort(address, std::move(credentials), &impl->port);
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // Finds clients that vanished without a word, and lets eager ones ping.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 30000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10000);
  GuardReflection(&builder, reflection, Role::kInference);
  SetMetadataLimits(&builder);
  builder.RegisterService(service->service());
  impl->server = builder.BuildAndStart();
  if (impl->server == nullptr) return absl::UnavailableError(WhyNotListening(address));
  impl->server->GetHealthCheckService()->SetServingStatus("", true);
  auto server = std::unique_ptr<PublicServer>(new PublicServer(std::move(impl)));
  server->SetServing(false);
  return server;
}

int PublicServer::port() const { return impl_->port; }

void PublicServer::SetServing(bool serving) {
  impl_->server->GetHealthCheckService()->SetServingStatus(kInferenceService, serving);
}

}  // namespace dflash
