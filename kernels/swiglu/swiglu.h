// Element-wise gates of feed-forward and attention blocks.
#pragma once

#include "absl/status/status.h"
#include "base/matrix_view.h"
#include "base/phase.h"
#include "kernels/device/stream.h"
#include "kernels/linear/linear.h"

namespace dflash {

// y[t, f] = silu(gate_up[t, f]) * gate_up[t, F + f].
// gate_up: activation dtype [T, 2 F] (gate columns first); y: [T, F]. No aliasing.
// Errors: InvalidArgument when shapes disagree.
absl::Status SwiGlu(ConstMatrixView gate_up, MatrixView y, const Stream& stream);

// y = SwiGlu of x Wᵀ: Linear into gate_up and SwiGlu of that, with the bits of the two calls. Fast for
// weights that are packed for it (LinearUse::kGateUp). x: activation dtype [T, K]; w: [2 F, K] (gate outputs
// first); y: activation dtype [T, F]. gate_up: activation dtype [T, 2 F], scratch: what it holds afterwards
// is not said. No aliasing. Errors: those of the two.
absl::Status LinearSwiGlu(ConstMatrixView x, const LinearWeight& w, Phase phase, MatrixView gate_up,
                          MatrixView y, const Stream& stream);

// x[t, c] *= sigmoid(gate[t, c]): the output gate of the target's full attention.
// x, gate: activation dtype [T, C]. Errors: InvalidArgument when shapes disagree.
absl::Status SigmoidGate(MatrixView x, ConstMatrixView gate, const Stream& stream);

}  // namespace dflash
