// Turns bytes that ought to be UTF-8 into UTF-8. Ill-formed input is never an error: each maximal ill-formed
// subsequence becomes one U+FFFD (Unicode Standard 3.9, "U+FFFD substitution of maximal subparts"; the same
// as the WHATWG decoder and as Rust's from_utf8_lossy). Surrogates, overlong forms and values above U+10FFFF
// are ill-formed. Pure functions, any thread.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace dflash {

// Appends `bytes` to `out` as well-formed UTF-8. Returns how many bytes at the end were not taken because
// they begin a character that the next bytes may complete: 0..3. Feed them again in front of those.
size_t AppendWellFormed(std::string_view bytes, std::string& out);

// All of `bytes` as well-formed UTF-8: a character that is incomplete at the end becomes U+FFFD as well.
std::string ReplaceIllFormed(std::string_view bytes);

// U+FFFD in UTF-8.
inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";

}  // namespace dflash
