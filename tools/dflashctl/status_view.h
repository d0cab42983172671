// The answer of `dflashctl status` for people.
#pragma once

#include <string>

#include "dflash/v1/inference.pb.h"

namespace dflash::ctl {

// One "label  value" line per fact; every group has its own.
std::string StatusText(const v1::GetModelInfoResponse& model, const v1::GetLoadResponse& load);

// The verdict on a group's drafter in one line; empty: the group has not reported.
std::string HealthText(const v1::SpeculationHealth& health);

}  // namespace dflash::ctl
