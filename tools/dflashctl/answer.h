// One generation shown as it comes.
#pragma once

#include "absl/time/time.h"
#include "dflash/v1/generation.pb.h"
#include "tools/dflashctl/connection.h"

namespace dflash::ctl {

struct AnswerOptions {
  absl::Duration timeout = absl::InfiniteDuration();
  bool show_rounds =
      false;  // text with its origins (RoundPainter); asks the server to detokenize round by round
};

// Streams the text of one generation to standard output, then, on success, its summary to standard error.
// Colours only where standard output is a terminal and NO_COLOR is not set.
grpc::Status StreamAnswer(Connection* connection, const v1::GenerateRequest& request,
                          const AnswerOptions& options, Generation* result);

}  // namespace dflash::ctl
