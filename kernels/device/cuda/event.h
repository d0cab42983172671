#pragma once

#include "kernels/device/event.h"
