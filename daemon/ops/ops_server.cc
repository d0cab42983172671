#include "daemon/ops/ops_server.h"

#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include <boost/asio.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>

#include "absl/strings/str_cat.h"
#include "base/host_port.h"
#include "base/status.h"

namespace dflash {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using asio::ip::tcp;

constexpr auto kTimeout = std::chrono::seconds(10);  // of one request and its answer
constexpr uint32_t kMaxHeaderBytes = 8 << 10;
constexpr uint64_t kMaxBodyBytes = 1 << 10;
constexpr int kMaxConnections = 512;  // an idle one is closed after kTimeout

// One connection: reads a request, answers, reads the next.
class Session : public std::enable_shared_from_this<Session> {
 public:
  Session(tcp::socket socket, const OpsHandler& handler, int& connections)
      : stream_(std::move(socket)), handler_(handler), connections_(connections) {
    ++connections_;
  }
  ~Session() { --connections_; }

  void Read() {
    parser_.emplace();
    parser_->header_limit(kMaxHeaderBytes);
    parser_->body_limit(kMaxBodyBytes);
    stream_.expires_after(kTimeout);
    http::async_read(stream_, buffer_, *parser_,
                     [self = shared_from_this()](beast::error_code error, size_t) {
                       if (!error) self->Answer(self->parser_->release());
                     });
  }

 private:
  void Answer(const http::request<http::string_body>& request) {
    OpsReply reply = {.status = 405, .body = "only GET and HEAD\n"};
    if (request.method() == http::verb::get || request.method() == http::verb::head) {
      const std::string target(request.target());
      const size_t mark = target.find('?');
      reply = handler_({.path = target.substr(0, mark),
                        .query = mark == std::string::npos ? "" : target.substr(mark + 1),
                        .authorization = std::string(request[http::field::authorization])});
    }
    response_ = {static_cast<http::status>(reply.status), request.version()};
    response_.set(http::field::server, "dflashd");
    response_.set(http::field::content_type, reply.content_type);
    if (reply.status == 401) response_.set(http::field::www_authenticate, "Bearer");
    response_.keep_alive(request.keep_alive());
    response_.body() = std::move(reply.body);
    response_.prepare_payload();
    if (request.method() == http::verb::head) response_.body().clear();
    http::async_write(stream_, response_, [self = shared_from_this()](beast::error_code error, size_t) {
      if (error) return;
      if (self->response_.need_eof()) {
        beast::error_code ignored;
        self->stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);
        return;
      }
      self->Read();
    });
  }

  beast::tcp_stream stream_;
  const OpsHandler& handler_;
  int& connections_;
  beast::flat_buffer buffer_;
  std::optional<http::request_parser<http::string_body>> parser_;
  http::response<http::string_body> response_;
};

}  // namespace

class OpsServer::Impl {
 public:
  explicit Impl(OpsHandler handler) : handler_(std::move(handler)), acceptor_(context_) {}
  ~Impl() {
    context_.stop();
    if (thread_.joinable()) thread_.join();
  }

  absl::Status Listen(const std::string& host, int port) {
    beast::error_code error;
    tcp::resolver resolver(context_);
    const auto found = resolver.resolve(host, std::to_string(port), tcp::resolver::passive, error);
    if (error) return absl::UnavailableError(absl::StrCat("cannot resolve ", host, ": ", error.message()));
    const tcp::endpoint endpoint = found.begin()->endpoint();
    acceptor_.open(endpoint.protocol(), error);
    if (!error) acceptor_.set_option(asio::socket_base::reuse_address(true), error);
    if (!error) acceptor_.bind(endpoint, error);
    if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
    if (error)
      return absl::UnavailableError(
          absl::StrCat("cannot listen on ", host, ":", port, ": ", error.message()));
    port_ = acceptor_.local_endpoint().port();
    Accept();
    thread_ = std::thread([this] { context_.run(); });
    return absl::OkStatus();
  }

  int port() const { return port_; }

 private:
  void Accept() {
    acceptor_.async_accept([this](beast::error_code error, tcp::socket socket) {
      if (error == asio::error::operation_aborted) return;
      if (!error && connections_ < kMaxConnections) {
        std::make_shared<Session>(std::move(socket), handler_, connections_)->Read();
      }
      Accept();
    });
  }

  const OpsHandler handler_;
  int connections_ = 0;  // outlives the context, whose pending handlers hold sessions
  asio::io_context context_;
  tcp::acceptor acceptor_;
  std::thread thread_;
  int port_ = 0;
};

OpsServer::OpsServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
OpsServer::~OpsServer() = default;
int OpsServer::port() const { return impl_->port(); }

absl::StatusOr<std::unique_ptr<OpsServer>> OpsServer::Start(const std::string& address, OpsHandler handler) {
  DFLASH_ASSIGN_OR_RETURN(const auto host_port, SplitHostPort(address));
  auto impl = std::make_unique<Impl>(std::move(handler));
  DFLASH_RETURN_IF_ERROR(impl->Listen(host_port.first, host_port.second));
  return std::unique_ptr<OpsServer>(new OpsServer(std::move(impl)));
}

}  // namespace dflash
