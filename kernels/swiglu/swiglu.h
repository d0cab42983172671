// Element-wise gates of feed-forward and attention blocks.
#pragma once

#include "absl/status/status.h"
#include "base/matrix_view.h"
#include "kernels/device/stream.h"

namespace dflash {

// y[t, f] = silu(gate_up[t, f]) * gate_up[t, F + f].
// gate_up: activation dtype [T, 2 F] (gate columns first); y: [T, F]. No aliasing.
// Errors: InvalidArgument when shapes disagree.
absl::Status SwiGlu(ConstMatrixView gate_up, MatrixView y, const Stream& stream);

// x[t, c] *= sigmoid(gate[t, c]): the output gate of the target's full attention.
// x, gate: activation dtype [T, C]. Errors: InvalidArgument when shapes disagree.
absl::Status SigmoidGate(MatrixView x, ConstMatrixView gate, const Stream& stream);

}  // namespace dflash
