#include "kernels/attention/attention_cpu_body.h"

namespace dflash {

void AttendAvx512(const AttentionTask& task) { simd_avx512::Attend(task); }

}  // namespace dflash
