#include "kernels/causal_conv/causal_conv_cpu_body.h"
