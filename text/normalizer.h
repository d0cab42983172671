// Unicode normalization form C (Unicode Standard Annex 15), with the tables of utf8proc.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace dflash {

// Returns the NFC form of `text`, which must be well-formed UTF-8. Takes linear time for any input, long
// runs of unordered combining marks included. Any thread.
std::string NormalizeNfc(std::string_view text);

// A text has at most so many times the bytes of its NFC form. The most is 3.5: U+1FBE U+0308 U+0301, seven
// bytes, become U+0390, two.
constexpr size_t kMaxNfcShrink = 4;

}  // namespace dflash
