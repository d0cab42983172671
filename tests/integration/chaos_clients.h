// Clients of a server under fire. They know what every answer has to be, and what may come instead: each
// answer is compared, token for token, with what the same request gives on a quiet server, and each error is
// held against what happened to the server meanwhile.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "tests/integration/server.h"
#include "tools/dflashctl/connection.h"

namespace dflash::integration {

// What happened to the server, and when.
class Disturbances {
 public:
  enum Kind : uint8_t {
    kCoordinatorDown,  // from the signal until the next one serves
    kDraining,
    kDropped,  // connections of clients
  };
  // Ends with End, or never.
  size_t Begin(Kind kind);
  void End(size_t which);
  // Whether one of the kind overlaps the time from `begin` to `end`.
  bool Happened(Kind kind, absl::Time begin, absl::Time end) const;

 private:
  struct Disturbance {
    Kind kind;
    absl::Time begin, end;
  };
  mutable std::mutex mutex_;
  std::vector<Disturbance> all_;
};

// A request and what it gives.
struct KnownText {
  v1::GenerateRequest request;
  ctl::Generation expected;
  bool can_resume = false;
};
// Asks a quiet server, once for each. The last one is long.
std::vector<KnownText> LearnTexts(Server& quiet);

// One call of Generate, as its client saw it.
struct Attempt {
  std::string id;
  int first_life = 0, last_life = 0;  // of the coordinator: at its begin and at its end
  grpc::Status status;
  std::string reason;  // of the server; empty: the server said nothing, or OK
  uint64_t tokens = 0;
  // The server has said how it ended.
  bool IsDefinite() const { return status.ok() || !reason.empty(); }
};

class ChaosClients {
 public:
  // None is owned. `long_stalls`: some read nothing for longer than the server waits for them.
  ChaosClients(uint64_t seed, std::string address, const std::vector<KnownText>* texts,
               const Disturbances* disturbances, bool long_stalls);
  ~ChaosClients();

  void Start(int count);
  // Waits until every client has ended what it does, and closed its connection; false when one does not.
  bool Pause();
  void Continue();
  // The same for ever.
  bool Stop();

  // Many calls at once, each with a deadline of milliseconds, or cancelled.
  void Storm(uint32_t pick, bool deadlines);
  // Which life of the coordinator comes next.
  void SetLife(int life) { life_ = life; }

  std::vector<Attempt> attempts() const;
  // By what was done and how it ended.
  std::map<std::string, int64_t> counts() const;
  uint64_t replays() const { return replays_; }
  // What went wrong; empty: nothing.
  std::vector<std::string> complaints() const;
  // What clients that have not ended are doing.
  std::string Doing() const;

 private:
  struct Call {
    Attempt attempt;
    ctl::Generation generation;
    absl::Time begin, end;
    std::optional<absl::Duration> hint;  // when to come again
  };
  using OnChunk = std::function<void(grpc::ClientContext*, const std::string& id, const ctl::Generation&)>;
  class Client;

  void Run(size_t index);
  void Count(const std::string& what);
  void Complain(const std::string& what);
  std::string NewId() { return "chaos-" + std::to_string(next_id_++); }
  // What is wrong with how a call ended, beside those ways that it asked for.
  std::string Judge(const Call& call) const;

  const uint64_t seed_;
  const std::string address_;
  const std::vector<KnownText>* const texts_;
  const Disturbances* const disturbances_;
  const bool long_stalls_;
  std::atomic<int> life_ = 0;
  std::atomic<uint64_t> next_id_ = 0, replays_ = 0;
  std::vector<std::thread> threads_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool paused_ = false, stopped_ = false;
  size_t parked_ = 0;
  std::map<size_t, std::string> doing_;
  std::vector<Attempt> attempts_;
  std::map<std::string, int64_t> counts_;
  std::vector<std::string> complaints_;
};

}  // namespace dflash::integration
