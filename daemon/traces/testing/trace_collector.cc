#include "daemon/traces/testing/trace_collector.h"

#include <memory>
#include <utility>

#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>

#include "absl/strings/str_cat.h"

namespace dflash::testing {

namespace beast = boost::beast;
namespace http = boost::beast::http;
using boost::asio::ip::tcp;

class TraceCollectorSession : public std::enable_shared_from_this<TraceCollectorSession> {
 public:
  TraceCollectorSession(tcp::socket socket, TraceCollector* collector)
      : stream_(std::move(socket)), collector_(collector) {}
  void Read() {
    parser_.body_limit(64 << 20);
    http::async_read(stream_, buffer_, parser_, [self = shared_from_this()](beast::error_code error, size_t) {
      if (!error) self->Answer();
    });
  }

 private:
  void Answer() {
    const auto& request = parser_.get();
    collector_->Take(std::string(request.target()), std::string(request[http::field::content_type]),
                     request.body());
    if (collector_->status_ == 0) {  // holds the connection until the other side has had enough
      http::async_read(stream_, buffer_, next_, [self = shared_from_this()](beast::error_code, size_t) {});
      return;
    }
    answer_ = {static_cast<http::status>(collector_->status_), 11};
    answer_.body() = "{}";
    answer_.prepare_payload();
    answer_.keep_alive(false);
    http::async_write(stream_, answer_, [self = shared_from_this()](beast::error_code, size_t) {
      beast::error_code ignored;
      self->stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);
    });
  }

  beast::tcp_stream stream_;
  TraceCollector* const collector_;
  beast::flat_buffer buffer_;
  http::request_parser<http::string_body> parser_;
  http::request<http::string_body> next_;
  http::response<http::string_body> answer_;
};

TraceCollector::TraceCollector(int status, uint16_t port)
    : status_(status), acceptor_(context_, {boost::asio::ip::make_address("127.0.0.1"), port}) {
  Accept();
  thread_ = std::thread([this] { context_.run(); });
}

TraceCollector::~TraceCollector() {
  context_.stop();
  thread_.join();
}

std::string TraceCollector::url() const { return absl::StrCat("http://127.0.0.1:", port()); }

void TraceCollector::Accept() {
  acceptor_.async_accept([this](beast::error_code error, tcp::socket socket) {
    if (error) return;
    std::make_shared<TraceCollectorSession>(std::move(socket), this)->Read();
    Accept();
  });
}

void TraceCollector::Take(const std::string& target, const std::string& type, const std::string& body) {
  const nlohmann::json request = nlohmann::json::parse(body, nullptr, /*allow_exceptions=*/false);
  absl::MutexLock lock(&mutex_);
  ++exports_;
  if (target != "/v1/traces" || type != "application/json" || !request.is_object()) {
    complaint_ = absl::StrCat("POST ", target, " of ", type, ": ", body);
    return;
  }
  for (const nlohmann::json& resource : request["resourceSpans"]) {
    for (const nlohmann::json& scope : resource["scopeSpans"]) {
      for (const nlohmann::json& span : scope["spans"]) {
        spans_.push_back(span);
        spans_.back()["resource"] = resource["resource"];
      }
    }
  }
}

std::vector<nlohmann::json> TraceCollector::AwaitSpans(size_t count) {
  absl::MutexLock lock(&mutex_);
  const auto enough = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return spans_.size() >= count; };
  mutex_.AwaitWithTimeout(absl::Condition(&enough), absl::Seconds(30));
  return spans_;
}

bool TraceCollector::AwaitExports(size_t count) {
  absl::MutexLock lock(&mutex_);
  const auto enough = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return exports_ >= count; };
  return mutex_.AwaitWithTimeout(absl::Condition(&enough), absl::Seconds(30));
}

size_t TraceCollector::exports() const {
  absl::MutexLock lock(&mutex_);
  return exports_;
}

std::string TraceCollector::complaint() const {
  absl::MutexLock lock(&mutex_);
  return complaint_;
}

nlohmann::json AttributeOf(const nlohmann::json& span, const std::string& key) {
  for (const nlohmann::json& attribute : span["attributes"]) {
    if (attribute["key"] == key) return attribute["value"].begin().value();
  }
  return nullptr;
}

}  // namespace dflash::testing
