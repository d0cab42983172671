// What `dflashctl top` shows.
#pragma once

#include <string>

#include "dflash/v1/inference.pb.h"

namespace dflash::ctl {

// One screen: load, rates between two answers `seconds` apart, acceptance by depth. Rates are 0 where a
// counter has begun anew (the server or a group was started again).
std::string TopText(const v1::GetLoadResponse& before, const v1::GetLoadResponse& now, double seconds);

}  // namespace dflash::ctl
