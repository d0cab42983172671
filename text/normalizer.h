// Unicode normalization form C (Unicode Standard Annex 15), with the tables of utf8proc.
#pragma once

#include <string>
#include <string_view>

namespace dflash {

// Returns the NFC form of `text`, which must be well-formed UTF-8. Takes linear time for any input, long
// runs of unordered combining marks included. Any thread.
std::string NormalizeNfc(std::string_view text);

}  // namespace dflash
