#include "text/jinja/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <iterator>

#include "text/jinja/special_casing.h"

namespace dflash::jinja {

bool IsValidUtf8(std::string_view bytes) {
  size_t offset = 0;
  while (offset < bytes.size()) {
    utf8proc_int32_t value;
    const utf8proc_ssize_t size =
        utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(bytes.data()) + offset,
                         static_cast<utf8proc_ssize_t>(bytes.size() - offset), &value);
    if (size <= 0) return false;
    offset += static_cast<size_t>(size);
  }
  return true;
}

CodePoint DecodeUtf8(std::string_view bytes, size_t offset) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(bytes[offset + i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const size_t size = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  char32_t value = lead & (0xff >> (size + 1));
  for (size_t i = 1; i < size; ++i) value = (value << 6) | (byte(i) & 0x3f);
  return {value, size};
}

size_t PreviousBoundary(std::string_view bytes, size_t offset) {
  do --offset;
  while ((static_cast<unsigned char>(bytes[offset]) & 0xc0) == 0x80);
  return offset;
}

void AppendUtf8(char32_t value, std::string* out) {
  if (value < 0x80) {
    out->push_back(static_cast<char>(value));
  } else if (value < 0x800) {
    out->push_back(static_cast<char>(0xc0 | (value >> 6)));
    out->push_back(static_cast<char>(0x80 | (value & 0x3f)));
  } else if (value < 0x10000) {
    out->push_back(static_cast<char>(0xe0 | (value >> 12)));
    out->push_back(static_cast<char>(0x80 | ((value >> 6) & 0x3f)));
    out->push_back(static_cast<char>(0x80 | (value & 0x3f)));
  } else {
    out->push_back(static_cast<char>(0xf0 | (value >> 18)));
    out->push_back(static_cast<char>(0x80 | ((value >> 12) & 0x3f)));
    out->push_back(static_cast<char>(0x80 | ((value >> 6) & 0x3f)));
    out->push_back(static_cast<char>(0x80 | (value & 0x3f)));
  }
}

bool IsSpace(char32_t value) {
  return (value >= 0x09 && value <= 0x0d) || (value >= 0x1c && value <= 0x20) || value == 0x85 ||
         value == 0xa0 || value == 0x1680 || (value >= 0x2000 && value <= 0x200a) || value == 0x2028 ||
         value == 0x2029 || value == 0x202f || value == 0x205f || value == 0x3000;
}

bool IsLineBoundary(char32_t value) {
  return (value >= 0x0a && value <= 0x0d) || (value >= 0x1c && value <= 0x1e) || value == 0x85 ||
         value == 0x2028 || value == 0x2029;
}

bool IsPrintable(char32_t value) {
  if (value == ' ') return true;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(value))) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS:
      return false;
    default:
      return true;
  }
}

bool IsCased(char32_t value) {
  const auto code = static_cast<utf8proc_int32_t>(value);
  switch (utf8proc_category(code)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
      return true;
    default:
      return utf8proc_toupper(code) != code || utf8proc_tolower(code) != code;
  }
}

void AppendInCase(char32_t value, LetterCase letter_case, std::string* out) {
  const auto code = static_cast<utf8proc_int32_t>(value);
  if (letter_case == LetterCase::kLower) {
    AppendUtf8(value == 0x130 ? U'i' : static_cast<char32_t>(utf8proc_tolower(code)), out);
    if (value == 0x130) AppendUtf8(0x307, out);  // the one lower case mapping to two characters
    return;
  }
  const SpecialCasing* special =
      std::lower_bound(std::begin(kSpecialCasing), std::end(kSpecialCasing), value,
                       [](const SpecialCasing& entry, char32_t c) { return entry.code < c; });
  if (special != std::end(kSpecialCasing) && special->code == value) {
    for (char32_t c : letter_case == LetterCase::kUpper ? special->upper : special->title) {
      if (c != 0) AppendUtf8(c, out);
    }
    return;
  }
  AppendUtf8(static_cast<char32_t>(letter_case == LetterCase::kUpper ? utf8proc_toupper(code)
                                                                     : utf8proc_totitle(code)),
             out);
}

}  // namespace dflash::jinja
