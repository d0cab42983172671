// What a worker group's own reports say about its drafter, as messages.
#pragma once

#include "daemon/metrics/exporter.h"
#include "daemon/routing/dispatcher.h"
#include "dflash/v1/admin.pb.h"

namespace dflash {

v1::SpeculationHealth HealthOf(const Exporter& exporter, const Dispatcher::GroupStats& group);
v1::GroupDiagnosis DiagnosisOf(const Exporter& exporter, const Dispatcher::GroupStats& group);

}  // namespace dflash
