#pragma once

#include "kernels/device/graph.h"
