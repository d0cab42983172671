// Between the daemon's structs and the messages of dflash.worker.v1.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/request/group_request.h"
#include "dflash/worker/v1/worker.pb.h"
#include "prometheus/metric_family.h"

namespace dflash {

namespace wire = ::dflash::worker::v1;

// FailedPrecondition: the worker's build is not `build`.
absl::StatusOr<GroupInfo> FromMessage(const wire::GetGroupInfoResponse& message, const std::string& build);
wire::Submit ToMessage(const std::string& key, const GroupRequest& request, absl::Time now);
StepOutput FromMessage(wire::Tokens&& message);
FinishedOutput FromMessage(const wire::Finished& message);
// The failure as a client sees it, with the worker's reason or that of its code. A worker cannot report OK:
// that is Internal.
absl::Status FromMessage(const wire::Failed& message);
// Type, help and bucket bounds come from base/metric_names.h; families that it does not list are left out.
std::vector<prometheus::MetricFamily> FromMessage(const wire::MetricsSnapshot& message);

}  // namespace dflash
