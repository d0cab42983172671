#include "text/utf8.h"

#include <cstdint>

namespace dflash {
namespace {

struct Sequence {
  size_t length;     // bytes of the character, or of the longest prefix of one that is here
  bool well_formed;  // a whole character
  bool at_end;       // not whole, and nothing but the end of the bytes stopped it
};

// The ranges are those of the Unicode Standard, table 3-7: only the second byte depends on the first.
Sequence ReadSequence(std::string_view bytes, size_t pos) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(bytes[i]); };
  const uint8_t lead = byte(pos);
  if (lead < 0x80) return {1, true, false};
  size_t length;
  uint8_t low = 0x80, high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return {1, false, false};
  }
  for (size_t i = 1; i < length; ++i) {
    if (pos + i == bytes.size()) return {i, false, true};
    if (byte(pos + i) < low || byte(pos + i) > high) return {i, false, false};
    low = 0x80;
    high = 0xBF;
  }
  return {length, true, false};
}

}  // namespace

size_t AppendWellFormed(std::string_view bytes, std::string& out) {
  size_t copied = 0;  // bytes before this are in `out`
  size_t pos = 0;
  while (pos < bytes.size()) {
    const Sequence sequence = ReadSequence(bytes, pos);
    if (sequence.at_end) break;
    if (!sequence.well_formed) {
      out.append(bytes, copied, pos - copied);
      out.append(kReplacementCharacter);
      copied = pos + sequence.length;
    }
    pos += sequence.length;
  }
  out.append(bytes, copied, pos - copied);
  return bytes.size() - pos;
}

std::string ReplaceIllFormed(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size());
  if (AppendWellFormed(bytes, out) > 0) out.append(kReplacementCharacter);
  return out;
}

}  // namespace dflash
