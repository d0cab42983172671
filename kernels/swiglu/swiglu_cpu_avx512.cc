#include "kernels/swiglu/swiglu_cpu_body.h"
