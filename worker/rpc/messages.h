// Between the engine's structs and the messages of dflash.worker.v1.
#pragma once

#include <string>
#include <vector>

#include "dflash/worker/v1/worker.pb.h"
#include "prometheus/metric_family.h"
#include "worker/engine/engine.h"
#include "worker/engine/request.h"
#include "worker/rpc/worker_server.h"

namespace dflash {

namespace wire = ::dflash::worker::v1;

wire::GetGroupInfoResponse ToMessage(const GroupIdentity& identity, int32_t pid);
GenerationRequest FromMessage(wire::Submit&& submit, absl::Time now);
wire::Started ToMessage(const std::string& id, const StartedReport& report);
wire::Tokens ToMessage(const std::string& id, TokensReport&& report);
wire::Finished ToMessage(const std::string& id, const FinishedReport& report);
wire::Failed ToMessage(const std::string& id, const absl::Status& status);
wire::MetricsSnapshot ToMessage(const std::vector<prometheus::MetricFamily>& families);

}  // namespace dflash
