#include "worker/comm/communicator.h"

#include "base/status.h"

namespace dflash {

absl::Status Communicator::AllReduceAddRmsNorm(MatrixView product, MatrixView residual, ConstMatrixView w,
                                               NormWeight weight, float eps, MatrixView y,
                                               const Stream& stream) {
  if (product.row_stride != product.cols)
    return absl::InvalidArgumentError("AllReduceAddRmsNorm: the product is not dense");
  DFLASH_RETURN_IF_ERROR(AllReduce(product.data, product.rows * product.cols, product.dtype, stream));
  return AddRmsNorm(residual, product, w, weight, eps, y, stream);
}

}  // namespace dflash
