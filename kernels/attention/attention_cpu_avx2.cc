#include "kernels/attention/attention_cpu_body.h"

namespace dflash {

void AttendAvx2(const AttentionTask& task) { simd_avx2::Attend(task); }

}  // namespace dflash
