#include "text/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "base/check.h"

namespace dflash {
namespace {

constexpr auto kDecompose = static_cast<utf8proc_option_t>(UTF8PROC_DECOMPOSE | UTF8PROC_STABLE);
constexpr auto kCompose = static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE);
constexpr utf8proc_ssize_t kMaxDecomposition = 18;  // of one code point, any form

bool IsContinuation(char byte) { return (static_cast<uint8_t>(byte) & 0xC0) == 0x80; }

// Every code point below U+0300 is a starter, is its own NFC form and never joins what stands before it, so a
// text may be cut in front of it. 0xCC is the first byte of U+0300.
bool NeedsTables(char lead) { return static_cast<uint8_t>(lead) >= 0xCC; }

// In [0, 255).
int CombiningClass(utf8proc_int32_t code_point) { return utf8proc_get_property(code_point)->combining_class; }

// Canonical order of a run of marks: ascending classes, marks of one class as they were (a counting sort).
// `copy` is memory to work in.
using Points = std::vector<utf8proc_int32_t>;
void OrderMarks(Points::iterator begin, Points::iterator end, Points& copy) {
  const auto by_class = [](utf8proc_int32_t a, utf8proc_int32_t b) {
    return CombiningClass(a) < CombiningClass(b);
  };
  if (std::is_sorted(begin, end, by_class)) return;
  copy.assign(begin, end);
  std::array<ptrdiff_t, 256> next{};  // place of the next mark, by class
  for (const utf8proc_int32_t mark : copy) ++next[static_cast<size_t>(CombiningClass(mark))];
  std::exclusive_scan(next.begin(), next.end(), next.begin(), ptrdiff_t{0});
  for (const utf8proc_int32_t mark : copy) begin[next[static_cast<size_t>(CombiningClass(mark))]++] = mark;
}

// utf8proc_map would do all of this, but it orders marks by neighbour swaps, in quadratic time.
void AppendNormalized(std::string_view text, std::string& out) {
  Points points;
  points.reserve(text.size());
  const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
  for (size_t pos = 0; pos < text.size();) {
    utf8proc_int32_t code_point;
    const utf8proc_ssize_t length =
        utf8proc_iterate(bytes + pos, static_cast<utf8proc_ssize_t>(text.size() - pos), &code_point);
    DFLASH_CHECK(length > 0, "text to normalize is not well-formed UTF-8");
    pos += static_cast<size_t>(length);
    utf8proc_int32_t parts[kMaxDecomposition];
    int last_boundary_class = 0;
    const utf8proc_ssize_t count =
        utf8proc_decompose_char(code_point, parts, kMaxDecomposition, kDecompose, &last_boundary_class);
    DFLASH_CHECK(count > 0 && count <= kMaxDecomposition);
    points.insert(points.end(), parts, parts + count);
  }

  Points marks;
  for (auto begin = points.begin(); begin != points.end();) {
    if (CombiningClass(*begin) == 0) {
      ++begin;
      continue;
    }
    const auto end =
        std::find_if(begin, points.end(), [](utf8proc_int32_t p) { return CombiningClass(p) == 0; });
    OrderMarks(begin, end, marks);
    begin = end;
  }

  const utf8proc_ssize_t composed =
      utf8proc_normalize_utf32(points.data(), static_cast<utf8proc_ssize_t>(points.size()), kCompose);
  DFLASH_CHECK(composed >= 0);
  for (utf8proc_ssize_t i = 0; i < composed; ++i) {
    utf8proc_uint8_t encoded[4];
    const utf8proc_ssize_t length = utf8proc_encode_char(points[static_cast<size_t>(i)], encoded);
    out.append(reinterpret_cast<const char*>(encoded), static_cast<size_t>(length));
  }
}

}  // namespace

std::string NormalizeNfc(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  size_t copied = 0;  // text before this is in `out`
  for (size_t pos = 0; pos < text.size();) {
    if (!NeedsTables(text[pos])) {
      ++pos;
      continue;
    }
    size_t begin = pos;  // with the character in front, which the first one may join
    while (begin > copied) {
      if (!IsContinuation(text[--begin])) break;
    }
    size_t end = pos;
    while (end < text.size() && (NeedsTables(text[end]) || IsContinuation(text[end]))) ++end;
    out.append(text, copied, begin - copied);
    AppendNormalized(text.substr(begin, end - begin), out);
    copied = pos = end;
  }
  out.append(text, copied);
  return out;
}

}  // namespace dflash
