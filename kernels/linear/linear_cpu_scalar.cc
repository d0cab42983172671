#include "kernels/linear/linear_cpu_body.h"
