// A small OpenTelemetry collector: takes OTLP over HTTP in JSON and keeps what it got.
#pragma once

#include <cstdint>
#include <string>
#include <thread>
#include <utility>  // which this Boost forgets
#include <vector>

#include <boost/asio.hpp>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "nlohmann/json.hpp"

namespace dflash::testing {

class TraceCollector {
 public:
  // Answers every export with `status`; 0: takes it and never answers.
  explicit TraceCollector(int status = 200, uint16_t port = 0);
  ~TraceCollector();

  uint16_t port() const { return acceptor_.local_endpoint().port(); }
  std::string url() const;
  // Waits until so many spans are here, or for half a minute, and returns all of them.
  std::vector<nlohmann::json> AwaitSpans(size_t count);
  // Exports that came, and whatever was wrong with one.
  size_t exports() const;
  std::string complaint() const;
  bool AwaitExports(size_t count);

 private:
  void Accept();
  void Take(const std::string& target, const std::string& type, const std::string& body);

  const int status_;
  boost::asio::io_context context_;
  boost::asio::ip::tcp::acceptor acceptor_;
  mutable absl::Mutex mutex_;
  std::vector<nlohmann::json> spans_ ABSL_GUARDED_BY(mutex_);
  size_t exports_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string complaint_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;

  friend class TraceCollectorSession;
};

// The value of an attribute of a span, or null.
nlohmann::json AttributeOf(const nlohmann::json& span, const std::string& key);

}  // namespace dflash::testing
