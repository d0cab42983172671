#pragma once

#include <cuda.h>  // types only; nothing of libcuda is linked
#include <cuda_runtime_api.h>

#include "base/matrix_view.h"

namespace dflash {

// Describes a bf16 matrix for the copy engine: boxes of `box_rows` (at most 256) rows x 64 columns with the
// 128-byte swizzle, zeros outside. Every row must begin at a multiple of 16 bytes. The map holds the
// matrix's address: pass it by value as a __grid_constant__ parameter.
cudaError_t MakeRowsTensorMap(ConstMatrixView matrix, int box_rows, CUtensorMap* map);

}  // namespace dflash
