// What Python's `str` knows about Unicode and Jinja templates rely on: code points, white space, line
// boundaries, case. Every function that takes text expects valid UTF-8 (IsValidUtf8); nothing here allocates
// without a result.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace dflash::jinja {

bool IsValidUtf8(std::string_view bytes);

struct CodePoint {
  char32_t value;
  size_t size;  // bytes
};

// Decodes the code point at `offset`, a character boundary below bytes.size().
CodePoint DecodeUtf8(std::string_view bytes, size_t offset);

// Returns the boundary before `offset`, a character boundary above 0.
size_t PreviousBoundary(std::string_view bytes, size_t offset);

void AppendUtf8(char32_t value, std::string* out);

// str.isspace() of one character: what strip(), split() and the regular expression \s take as white space.
bool IsSpace(char32_t value);

// Where str.splitlines() splits ("\r\n" counts as one boundary there).
bool IsLineBoundary(char32_t value);

// str.isprintable() of one character: what repr() leaves unescaped.
bool IsPrintable(char32_t value);

// Whether the character has upper or lower case forms: where str.title() sees the inside of a word. (Modifier
// letters such as U+00AA, which Python counts too, are not.)
bool IsCased(char32_t value);

enum class LetterCase { kUpper, kLower, kTitle };

// Appends the full case mapping of one character (several characters for "ß" and its like). Mappings that
// depend on the neighbours (the final sigma) are the caller's.
void AppendInCase(char32_t value, LetterCase letter_case, std::string* out);

}  // namespace dflash::jinja
