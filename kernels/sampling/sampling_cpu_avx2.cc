#include "kernels/sampling/sampling_cpu_body.h"
