// A running dflashd with its worker on the small pair, on ports that were free, and what tests ask of it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "dflash/v1/inference.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "tests/integration/process.h"
#include "tools/dflashctl/connection.h"

namespace dflash::integration {

std::string SourcePath(const std::string& relative);  // in the repository
std::string DflashctlPath();
std::string DflashdPath();
std::string LeavingWorkerPath();  // leaving_worker.cc

std::string WorkerPath();  // dflash-worker
std::string TinyTarget();  // folder of the small target
// A port that was free a moment ago, and below those that the system hands out to whoever asks for any.
int FreePort();
// The command line of a daemon on the small pair (or another target's folder) and free ports (but for the
// --listen and --draft-model of `flags`), with `flags` added.
std::vector<std::string> ServerCommand(const std::vector<std::string>& flags = {},
                                       const std::string& target = TinyTarget());

class Server {
 public:
  // Starts the daemon and waits until it serves. Fails the test when it does not.
  // Its log goes to `log`, if that is not empty.
  explicit Server(const std::vector<std::string>& flags = {}, const std::string& target = TinyTarget(),
                  const std::string& log = "");
  // Asks it to end, so that it cleans up behind itself, and waits.
  ~Server();

  Process& process() { return process_; }
  const std::string& address() const { return address_; }  // HOST:PORT of the public API
  const std::string& ops_address() const { return ops_address_; }
  const std::string& admin_address() const { return admin_address_; }
  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  v1::InferenceService::Stub& stub() { return *stub_; }

  v1::GetLoadResponse Load();
  v1::GetModelInfoResponse ModelInfo();
  // Waits until nothing runs or waits; false when that does not happen in time.
  bool WaitUntilIdle();
  // Waits until new requests are taken, again.
  bool WaitUntilServing();
  // Waits until so many requests run in a worker group.
  bool WaitUntilRunning(uint32_t count);
  // The whole metrics page.
  std::string Metrics();
  // Runs dflashctl against this server.
  ctl::Generation GenerateOk(const v1::GenerateRequest& request);
  Ran Dflashctl(std::vector<std::string> arguments, const std::string& input = "");

 private:
  Process process_;
  std::string address_, ops_address_, admin_address_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::InferenceService::Stub> stub_;
};

// One answer of an HTTP/1.1 server on this machine to GET; the empty string when it does not answer 200.
std::string HttpGet(const std::string& address, const std::string& target);

// The sum of a metric's series on a metrics page whose labels contain `label`.
double SumOfMetric(const std::string& page, const std::string& name, const std::string& label = "");

// A generation, read to its end by the client library of dflashctl, which checks the stream's own promises.
grpc::Status Generate(const std::shared_ptr<grpc::Channel>& channel, const v1::GenerateRequest& request,
                      absl::Duration timeout, ctl::Generation* result);

// A stream that a test reads message by message, drops or cancels.
class OpenStream {
 public:
  OpenStream(v1::InferenceService::Stub& stub, const v1::GenerateRequest& request,
             absl::Duration timeout = kPatience);
  ~OpenStream();
  // Reads until the first chunk with tokens; false when the stream ends before.
  bool ReadFirstTokens();
  // Reads until the request has its place in a group.
  bool ReadStarted();
  uint64_t tokens() const { return tokens_; }  // read so far
  void Cancel() { context_.TryCancel(); }
  // Reads to the end.
  grpc::Status Finish();

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>> reader_;
  bool finished_ = false;
  uint64_t tokens_ = 0;
};

// Requests.
v1::GenerateRequest TokenRequest(const std::vector<uint32_t>& prompt, uint32_t max_tokens);
// Greedy, and goes on for thousands of tokens.
v1::GenerateRequest EndlessRequest();
// Greedy and short: what a test sends to see that the server still works.
v1::GenerateRequest ShortRequest();
v1::GenerateRequest ChatRequest(const std::string& message);

}  // namespace dflash::integration
