#include "tools/dflash_bench/peak_body.h"
