#include "kernels/attention/attention_cpu_body.h"

namespace dflash {

void AttendScalar(const AttentionTask& task) { simd_scalar::Attend(task); }

}  // namespace dflash
