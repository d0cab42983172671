#include "kernels/gated_delta_net/gated_delta_net_cpu_body.h"
