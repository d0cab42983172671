#include "daemon/admission/client_limiter.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "daemon/request/request_error.h"

namespace dflash {

double ClientLimiter::Burst() const { return std::max(1.0, limits_.requests_per_second); }

void ClientLimiter::Recover(Client& client, absl::Time now) const {
  if (client.since == absl::InfinitePast()) {
    client.allowance = Burst();
  } else if (now > client.since) {
    const double gained = absl::ToDoubleSeconds(now - client.since) * limits_.requests_per_second;
    client.allowance = std::min(Burst(), client.allowance + gained);
  }
  client.since = std::max(client.since, now);
}

absl::Status ClientLimiter::Enter(const std::string& client, absl::Time now) {
  Client& own = clients_[client];
  Recover(own, now);
  if (limits_.max_requests > 0 && own.requests >= limits_.max_requests) {
    return WithDetails(
        absl::ResourceExhaustedError(absl::StrCat("one client may have ", limits_.max_requests,
                                                  " requests at a time, waiting and running")),
        {.reason = "CLIENT_LIMIT", .field = "", .retry_after = absl::Seconds(1), .metadata = {}});
  }
  if (limits_.requests_per_second > 0 && own.allowance < 1) {
    const absl::Duration wait = absl::Seconds((1 - own.allowance) / limits_.requests_per_second);
    return WithDetails(absl::ResourceExhaustedError(absl::StrCat(
                           "one client may send ", limits_.requests_per_second, " requests a second")),
                       {.reason = "RATE_LIMITED",
                        .field = "",
                        .retry_after = std::max(wait, absl::Milliseconds(1)),
                        .metadata = {}});
  }
  own.allowance -= 1;
  ++own.requests;
  return absl::OkStatus();
}

void ClientLimiter::Leave(const std::string& client) {
  const auto it = clients_.find(client);
  DFLASH_CHECK(it != clients_.end() && it->second.requests > 0, client.c_str());
  --it->second.requests;
}

void ClientLimiter::Forget(absl::Time now) {
  for (auto it = clients_.begin(); it != clients_.end();) {
    Recover(it->second, now);
    const bool idle =
        it->second.requests == 0 && (limits_.requests_per_second <= 0 || it->second.allowance >= Burst());
    it = idle ? clients_.erase(it) : std::next(it);
  }
}

}  // namespace dflash
