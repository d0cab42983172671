#pragma once

#include "kernels/device/pinned_buffer.h"
