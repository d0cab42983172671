#include "daemon/traces/trace_exporter.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <deque>
#include <iterator>
#include <optional>
#include <thread>
#include <utility>

#include <boost/asio.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/metric_names.h"
#include "daemon/traces/otlp.h"
#include "spdlog/spdlog.h"

namespace dflash {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using asio::ip::tcp;

constexpr uint64_t kMaxAnswerBytes = 64 << 10;

// One export over a connection of its own, every step within what is left of the time.
class Post {
 public:
  Post(const OtlpEndpoint& endpoint, std::string body)
      : endpoint_(endpoint), resolver_(context_), stream_(context_) {
    request_ = {http::verb::post, endpoint.path, 11};
    request_.set(http::field::host, absl::StrCat(endpoint.host, ":", endpoint.port));
    request_.set(http::field::user_agent, "dflashd");
    request_.set(http::field::content_type, "application/json");
    request_.set(http::field::connection, "close");
    request_.body() = std::move(body);
    request_.prepare_payload();
    answer_.body_limit(kMaxAnswerBytes);
  }

  // Empty: the collector has taken it. Else why not.
  std::string Run(absl::Duration timeout) {
    stream_.expires_after(std::chrono::nanoseconds(absl::ToInt64Nanoseconds(timeout)));
    asio::steady_timer limit(context_, std::chrono::nanoseconds(absl::ToInt64Nanoseconds(timeout)));
    // Resolving knows no time limit of its own.
    limit.async_wait([this](beast::error_code error) {
      if (!error) resolver_.cancel();
    });
    resolver_.async_resolve(
        endpoint_.host, endpoint_.port,
        [this, &limit](beast::error_code error, const tcp::resolver::results_type& found) {
          limit.cancel();
          if (error) return End("resolve", error);
          Connect(found);
        });
    context_.run();
    return why_;
  }

 private:
  void Connect(const tcp::resolver::results_type& found) {
    stream_.async_connect(found, [this](beast::error_code error, const tcp::endpoint&) {
      if (error) return End("connect", error);
      http::async_write(stream_, request_, [this](beast::error_code write_error, size_t) {
        if (write_error) return End("send", write_error);
        http::async_read(stream_, buffer_, answer_, [this](beast::error_code read_error, size_t) {
          if (read_error) return End("answer", read_error);
          const unsigned status = answer_.get().result_int();
          why_ = status / 100 == 2 ? "" : absl::StrCat("it answers HTTP ", status);
        });
      });
    });
  }
  void End(const char* what, beast::error_code error) { why_ = absl::StrCat(what, ": ", error.message()); }

  const OtlpEndpoint& endpoint_;
  asio::io_context context_;
  tcp::resolver resolver_;
  beast::tcp_stream stream_;
  http::request<http::string_body> request_;
  beast::flat_buffer buffer_;
  http::response_parser<http::string_body> answer_;
  std::string why_ = "nothing came of it";
};

}  // namespace

absl::StatusOr<OtlpEndpoint> ParseOtlpEndpoint(std::string_view url) {
  constexpr std::string_view kScheme = "http://";
  const std::string_view whole = url;
  const auto bad = [&](const char* why) {
    return absl::InvalidArgumentError(absl::StrCat("'", std::string(whole), "': ", why));
  };
  if (url.substr(0, kScheme.size()) != kScheme) return bad("must be http://HOST[:PORT][/PATH]");
  url.remove_prefix(kScheme.size());
  const std::string_view authority = url.substr(0, url.find('/'));
  OtlpEndpoint endpoint = {.host = std::string(authority), .port = "4318", .path = "/v1/traces"};
  if (authority.size() + 1 < url.size()) endpoint.path = std::string(url.substr(authority.size()));
  const size_t bracket = authority.rfind(']'), colon = authority.rfind(':');
  const bool has_port =
      colon != std::string_view::npos && (bracket == std::string_view::npos || colon > bracket);
  if (has_port) {
    endpoint.host = std::string(authority.substr(0, colon));
    endpoint.port = std::string(authority.substr(colon + 1));
    int port = 0;
    const char* end = endpoint.port.data() + endpoint.port.size();
    const auto [stop, error] = std::from_chars(endpoint.port.data(), end, port);
    if (error != std::errc() || stop != end || port < 1 || port > 65535) return bad("the port is no port");
  }
  if (endpoint.host.size() > 1 && endpoint.host.front() == '[' && endpoint.host.back() == ']')
    endpoint.host = endpoint.host.substr(1, endpoint.host.size() - 2);  // IPv6
  if (endpoint.host.empty()) return bad("there is no host");
  for (const char c : absl::StrCat(endpoint.host, endpoint.path)) {
    if (c <= ' ' || c == 0x7f || c == '@') return bad("has a character that no address has");
  }
  return endpoint;
}

class TraceExporter::Impl {
 public:
  Impl(Options options, MetricRegistry* registry)
      : options_(std::move(options)),
        exported_(registry->Counter(metrics::kTraceSpans, {{"outcome", "exported"}})),
        queue_full_(registry->Counter(metrics::kTraceSpans, {{"outcome", "queue_full"}})),
        failed_(registry->Counter(metrics::kTraceSpans, {{"outcome", "failed"}})),
        thread_([this] { Run(); }) {}
  ~Impl() {
    {
      absl::MutexLock lock(&mutex_);
      stopping_ = true;
    }
    thread_.join();
  }

  void Export(std::vector<Span> spans) {
    absl::MutexLock lock(&mutex_);
    if (queue_.size() + spans.size() > options_.max_queued) {
      queue_full_.Increment(static_cast<double>(spans.size()));
      return;
    }
    queue_.insert(queue_.end(), std::make_move_iterator(spans.begin()), std::make_move_iterator(spans.end()));
  }

  bool Flush(absl::Duration timeout) {
    absl::MutexLock lock(&mutex_);
    hurries_ = true;
    const auto done = [this]()
                          ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return queue_.empty() && !exporting_; };
    const bool flushed = mutex_.AwaitWithTimeout(absl::Condition(&done), timeout);
    hurries_ = false;
    return flushed;
  }

  double sample_ratio() const { return options_.sample_ratio; }

 private:
  // The next batch, once it is whole or has waited long enough; empty: there is none and will be none.
  std::vector<Span> Take() {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(
        +[](Impl* self)
             ABSL_EXCLUSIVE_LOCKS_REQUIRED(self->mutex_) { return self->stopping_ || !self->queue_.empty(); },
        this));
    mutex_.AwaitWithTimeout(absl::Condition(
                                +[](Impl* self) ABSL_EXCLUSIVE_LOCKS_REQUIRED(self->mutex_) {
                                  return self->stopping_ || self->hurries_ ||
                                         self->queue_.size() >= self->options_.max_batch;
                                },
                                this),
                            options_.interval);
    const auto end = queue_.begin() + static_cast<int64_t>(std::min(queue_.size(), options_.max_batch));
    std::vector<Span> batch(std::make_move_iterator(queue_.begin()), std::make_move_iterator(end));
    queue_.erase(queue_.begin(), end);
    exporting_ = !batch.empty();
    return batch;
  }

  void Run() {
    std::optional<absl::Time> last;  // by which everything has to be done
    bool works = true;
    for (;;) {
      const std::vector<Span> batch = Take();
      {
        absl::MutexLock lock(&mutex_);
        if (stopping_ && !last.has_value()) last = absl::Now() + options_.timeout;
      }
      if (batch.empty()) return;
      const absl::Duration timeout =
          last.has_value() ? std::min(options_.timeout, *last - absl::Now()) : options_.timeout;
      std::string why = "no time is left";
      if (timeout > absl::ZeroDuration())
        why = Post(options_.endpoint, OtlpJson(batch, options_.version)).Run(timeout);
      (why.empty() ? exported_ : failed_).Increment(static_cast<double>(batch.size()));
      {
        absl::MutexLock lock(&mutex_);
        exporting_ = false;
      }
      // Said once, not for every batch.
      if (!why.empty() && std::exchange(works, false))
        spdlog::warn("traces: the collector at {}:{} takes nothing, {}", options_.endpoint.host,
                     options_.endpoint.port, why);
      if (why.empty() && !std::exchange(works, true))
        spdlog::info("traces: the collector at {}:{} takes them again", options_.endpoint.host,
                     options_.endpoint.port);
    }
  }

  const Options options_;
  prometheus::Counter &exported_, &queue_full_, &failed_;
  absl::Mutex mutex_;
  std::deque<Span> queue_ ABSL_GUARDED_BY(mutex_);
  bool exporting_ ABSL_GUARDED_BY(mutex_) = false;  // a batch that is no longer in the queue
  bool hurries_ ABSL_GUARDED_BY(mutex_) = false;    // batches do not wait for more
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

TraceExporter::TraceExporter(Options options, MetricRegistry* registry)
    : impl_(std::make_unique<Impl>(std::move(options), registry)) {}
TraceExporter::~TraceExporter() = default;
void TraceExporter::Export(std::vector<Span> spans) { impl_->Export(std::move(spans)); }
bool TraceExporter::Flush(absl::Duration timeout) { return impl_->Flush(timeout); }

// The lower 56 bits of an id are random; 52 of them fit a double (W3C trace context, level 2).
bool TraceExporter::Samples(std::string_view trace_id) const {
  constexpr size_t kDigits = 13;
  if (trace_id.size() < kDigits) return false;
  const std::string_view digits = trace_id.substr(trace_id.size() - kDigits);
  uint64_t bits = 0;
  std::from_chars(digits.data(), digits.data() + digits.size(), bits, 16);
  return static_cast<double>(bits) < impl_->sample_ratio() * 0x1p52;
}

}  // namespace dflash
