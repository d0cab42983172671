#include "kernels/attention/attention_cpu_body.h"
