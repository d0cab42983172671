// dflashctl's side of the public API: one channel, calls that Ctrl-C cancels, errors in words.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/flag_parser.h"
#include "dflash/v1/inference.grpc.pb.h"
#include "grpcpp/grpcpp.h"

namespace dflash::ctl {

// Exit codes of dflashctl; `dflashctl --help` prints them.
enum ExitCode : int {
  kSuccess = 0,
  kDifferent = 1,     // replay found a difference
  kUsage = 2,         // bad flag, unreadable file
  kServerError = 3,   // the server cannot be reached, or it answered with an error
  kOutputLost = 4,    // standard output cannot be written (disk full)
  kInterrupted = 130  // Ctrl-C
};

// Turns SIGINT and SIGTERM into cancelled calls. The first signal cancels all calls that run; a signal while
// none runs, or a second one, ends the process with kInterrupted. Create it before any other thread: it
// blocks the signals in the calling thread, from which later threads inherit the mask.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  // True from a signal to the next Reset().
  bool raised() const { return raised_; }
  void Reset() { raised_ = false; }

  // Keeps `context` cancellable while it lives; cancels it at once when a signal came before.
  class Scope {
   public:
    Scope(Interrupt* interrupt, grpc::ClientContext* context);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Interrupt* const interrupt_;
    grpc::ClientContext* const context_;
  };

 private:
  void Watch();

  std::atomic<bool> raised_ = false;
  std::atomic<bool> stopping_ = false;
  std::mutex mutex_;
  std::set<grpc::ClientContext*> running_;
  std::thread watcher_;
};

// What a whole generation gave.
struct Generation {
  v1::Started started;
  v1::Finished finished;
  std::vector<uint32_t> token_ids;
  std::string text;
  std::vector<v1::StepInfo> rounds;
  std::vector<v1::TokenLogprobs> logprobs, prompt_logprobs;
  std::string reasoning;
  std::vector<v1::ToolCall> tool_calls;
  std::vector<Generation> others;  // choices 1, 2, ...
  double first_token_seconds = 0;  // call to first chunk, as the client saw it
  double total_seconds = 0;        // call to end of stream
};

// Runs one generation to its end and checks the stream's own promises. `on_chunk` (may be empty) sees every
// chunk as it comes. DataLoss when the stream breaks a promise (gaps in seq, no Finished, rounds that do not
// add up); otherwise the server's status.
grpc::Status ReadGeneration(v1::InferenceService::Stub& stub, grpc::ClientContext* context,
                            const v1::GenerateRequest& request,
                            const std::function<void(const v1::Chunk&)>& on_chunk, Generation* result);

// Where the daemon listens when --address is not given.
inline constexpr char kDefaultAddress[] = "127.0.0.1:8500";

// Where a server is and how to reach it.
struct Endpoint {
  std::string address;            // HOST:PORT or unix:PATH
  std::string tls_ca;             // PEM file of those who may vouch for the server; empty: no TLS
  std::string tls_cert, tls_key;  // PEM files of the client's own certificate; empty: none
  std::string tls_name;           // name that the server's certificate must have; empty: that of the address
  std::string token;              // sent with every call; empty: none

  // Dials lazily. With `own_connection` the channel shares its connection with no other.
  std::shared_ptr<grpc::Channel> Dial(bool own_connection = false) const;
  // Adds what every call carries.
  void Prepare(grpc::ClientContext* context) const;
};

// The same as flags.
class EndpointFlags {
 public:
  // The flags of a command that calls a server's public port, or with `admin` its operators' port.
  void Register(FlagParser* parser, bool admin = false);
  // Reads the files that the flags name. InvalidArgument, NotFound: names the file.
  absl::StatusOr<Endpoint> Read() const;

 private:
  Endpoint endpoint_;
  std::string token_file_;
};

class Connection {
 public:
  // `interrupt` is not owned. Dials lazily: errors come with the first call.
  Connection(const Endpoint& endpoint, Interrupt* interrupt);

  // As ReadGeneration; `timeout` is the call's deadline.
  grpc::Status Generate(const v1::GenerateRequest& request, absl::Duration timeout,
                        const std::function<void(const v1::Chunk&)>& on_chunk, Generation* result);

  grpc::Status GetModelInfo(v1::GetModelInfoResponse* response);
  grpc::Status GetLoad(v1::GetLoadResponse* response);
  grpc::Status Tokenize(const v1::TokenizeRequest& request, v1::TokenizeResponse* response);
  grpc::Status Detokenize(const v1::DetokenizeRequest& request, v1::DetokenizeResponse* response);
  grpc::Status RenderChat(const v1::RenderChatRequest& request, v1::RenderChatResponse* response);

  Interrupt* interrupt() const { return interrupt_; }

 private:
  const Endpoint endpoint_;
  std::unique_ptr<v1::InferenceService::Stub> stub_;
  Interrupt* const interrupt_;
};

// Checks the stream's own promises as its messages arrive (public so that tests can feed it).
class StreamChecker {
 public:
  // `first_token`: place of the first token to come; not 0 in a stream that goes on with an output (Resume).
  explicit StreamChecker(uint64_t first_token = 0) : first_token_(first_token) {}
  // Returns what is wrong with this message, if anything.
  std::optional<std::string> See(const v1::GenerateResponse& response);
  // After the last message of a stream that ended OK.
  std::optional<std::string> AtEnd() const;

 private:
  struct Choice {
    uint64_t tokens = 0;
    uint64_t prompt_places = 0;
    bool finished = false;
  };
  const uint64_t first_token_;
  uint64_t next_seq_ = 0;
  bool started_ = false;
  std::vector<Choice> choices_;  // as many as Started says
};

// "RESOURCE_EXHAUSTED: the queue is full (QUEUE_FULL, retry in 1.5s)".
std::string Describe(const grpc::Status& status);

}  // namespace dflash::ctl
