#include "kernels/elementary/elementary_lanes_body.h"
