// A load's figures as a picture.
#pragma once

#include <string>
#include <vector>

#include "tools/dflashctl/load_report.h"

namespace dflash::ctl {

// An SVG with three panels: the share of requests whose first token had come, and that had ended, after a
// time (one curve a phase, logarithmic time; requests that failed count as never); and, phase by phase, what
// was offered, finished and good. `results` and `figures` belong together.
std::string FormatPlot(const std::vector<LoadResult>& results, const std::vector<LoadFigures>& figures);

}  // namespace dflash::ctl
