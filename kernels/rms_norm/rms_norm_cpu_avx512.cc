#include "kernels/rms_norm/rms_norm_cpu_body.h"
