// What one client may have and ask for: requests at a time, requests a second. Pure bookkeeping: no clock, no
// threads.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace dflash {

struct ClientLimits {
  int64_t max_requests = 0;        // of one client, waiting and running; 0: no bound
  double requests_per_second = 0;  // sustained, with bursts of one second's worth; 0: no bound
};

class ClientLimiter {
 public:
  explicit ClientLimiter(const ClientLimits& limits) : limits_(limits) {}

  // One more request of this client, to be given back with Leave. ResourceExhausted, with nothing to give
  // back: it has too many (reason CLIENT_LIMIT) or they come too fast (RATE_LIMITED, with a hint when the
  // next may come).
  absl::Status Enter(const std::string& client, absl::Time now);
  void Leave(const std::string& client);

  // Forgets clients that have nothing and whose rate has recovered; call it now and then, so that clients
  // that come once do not pile up.
  void Forget(absl::Time now);
  size_t clients() const { return clients_.size(); }

 private:
  struct Client {
    int64_t requests = 0;
    double allowance = 0;                     // requests that may come now
    absl::Time since = absl::InfinitePast();  // when that was true
  };
  double Burst() const;
  void Recover(Client& client, absl::Time now) const;

  const ClientLimits limits_;
  std::unordered_map<std::string, Client> clients_;
};

}  // namespace dflash
