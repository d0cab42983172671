// Checks and words about views, for the error messages of the operations.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/matrix_view.h"

namespace dflash {

// "3x5 F32"
inline std::string Describe(const ConstMatrixView& view) {
  return absl::StrCat(view.rows, "x", view.cols, " ", Name(view.dtype));
}

// Whether the numbers of a view make sense: no negative size, rows that do not overlap, data where there are
// elements.
inline bool IsWellFormed(const ConstMatrixView& view) {
  return view.rows >= 0 && view.cols >= 0 && view.row_stride >= view.cols &&
         (view.data != nullptr || view.rows == 0 || view.cols == 0);
}

}  // namespace dflash
