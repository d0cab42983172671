// gRPC's own lines in the log of this process (base/log.h), as any other: level, component, "grpc: ...".
#pragma once

namespace dflash {

// From now on; what gRPC says at all is for GRPC_VERBOSITY to decide (its default: errors). Call it before
// gRPC is used.
void TakeGrpcLog();

}  // namespace dflash
