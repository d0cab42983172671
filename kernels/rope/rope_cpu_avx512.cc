#include "kernels/rope/rope_cpu_body.h"
