// The operators' HTTP port: plain text over HTTP/1.1 for probes, Prometheus and people with curl. Its own
// thread, so that it answers whatever the rest of the process is doing.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace dflash {

struct OpsReply {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
};

struct OpsRequest {
  std::string path;           // without query
  std::string query;          // what stands behind '?'
  std::string authorization;  // the header of that name, may be empty
};

// Answers GET and HEAD from the server's thread; must return at once. Unknown paths get 404.
using OpsHandler = std::function<OpsReply(const OpsRequest& request)>;

class OpsServer {
 public:
  // Listens on `address` ("HOST:PORT", "[V6]:PORT"; port 0 takes a free one). InvalidArgument: not such an
  // address; Unavailable, naming it: cannot listen there.
  static absl::StatusOr<std::unique_ptr<OpsServer>> Start(const std::string& address, OpsHandler handler);
  ~OpsServer();  // closes all connections

  int port() const;

 private:
  class Impl;
  explicit OpsServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace dflash
