#pragma once

#include <cuda.h>  // types only; nothing of libcuda is linked
#include <cuda_runtime_api.h>

#include "base/matrix_view.h"

namespace dflash {

// How a box lies in shared memory: rows of 128 bytes as they are, or with the 128-byte swizzle that matrix
// instructions want (the 16-byte piece p of row r at piece p xor (r mod 8)).
enum class BoxLayout { kPlain, kSwizzled };

// Describes a bf16 matrix for the copy engine: boxes of `box_rows` (at most 256) rows x 64 columns, zeros
// outside. Every row must begin at a multiple of 16 bytes. The map holds the matrix's address: pass it by
// value as a __grid_constant__ parameter.
cudaError_t MakeRowsTensorMap(ConstMatrixView matrix, int box_rows, BoxLayout layout, CUtensorMap* map);

// The same for rows of `heads` heads of head_dim columns: boxes of `box_rows` rows x `box_heads` heads (at
// most 256 each) x 64 columns, the heads of a row one after another, swizzled. Coordinates: column, head,
// row.
cudaError_t MakeHeadsTensorMap(ConstMatrixView matrix, int64_t head_dim, int box_heads, int box_rows,
                               CUtensorMap* map);

}  // namespace dflash
