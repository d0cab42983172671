#include "text/split_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace dflash {
namespace {

template <auto kFree>
struct FreeWith {
  template <typename T>
  void operator()(T* object) const {
    kFree(object);
  }
};
using CodePtr = std::unique_ptr<pcre2_code, FreeWith<pcre2_code_free>>;
using MatchDataPtr = std::unique_ptr<pcre2_match_data, FreeWith<pcre2_match_data_free>>;
using MatchContextPtr = std::unique_ptr<pcre2_match_context, FreeWith<pcre2_match_context_free>>;

// Backtracking over one run of spaces takes a step a space; texts are at most 16 MiB (text/tokenizer.h).
constexpr uint32_t kMatchLimit = 100'000'000;
constexpr uint32_t kHeapLimitKib = 64 * 1024;

std::string Message(int error) {
  char buffer[256];
  pcre2_get_error_message(error, reinterpret_cast<PCRE2_UCHAR*>(buffer), sizeof(buffer));
  return buffer;
}

// Rewrites `pattern` so that PCRE2 reads it as Oniguruma does, for which tokenizer files are written. Its \s
// has U+180E (Mongolian vowel separator), which left Unicode's White_Space in version 6.3. Other escapes of
// letters differ more (\w, \h) or have no place here (\K, \C), and none is known to be used.
absl::StatusOr<std::string> Translate(std::string_view pattern) {
  std::string out;
  for (size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] != '\\' || i + 1 == pattern.size()) {
      out.push_back(pattern[i]);
      continue;
    }
    const char escaped = pattern[++i];
    const std::string_view known_letters = "pPrnt";
    if (escaped == 's') {
      out.append("\\p{White_Space}");
    } else if (escaped == 'S') {
      out.append("\\P{White_Space}");
    } else if (absl::ascii_isalnum(static_cast<unsigned char>(escaped)) &&
               known_letters.find(escaped) == known_letters.npos) {
      return absl::UnimplementedError(
          absl::StrCat("regular expression: \\", std::string(1, escaped), " is not supported"));
    } else {
      out.append({'\\', escaped});
    }
  }
  return out;
}

// The beginning of a text that would fill the message, cut between characters.
std::string Shortened(std::string text) {
  constexpr size_t kMostBytes = 80;
  if (text.size() <= kMostBytes) return text;
  size_t end = kMostBytes;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return text.substr(0, end) + "...";
}

}  // namespace

struct SplitPattern::Code {
  CodePtr code;
  MatchContextPtr context;
};

SplitPattern::SplitPattern(std::unique_ptr<const Code> code) : code_(std::move(code)) {}
SplitPattern::SplitPattern(SplitPattern&&) noexcept = default;
SplitPattern& SplitPattern::operator=(SplitPattern&&) noexcept = default;
SplitPattern::~SplitPattern() = default;

absl::StatusOr<SplitPattern> SplitPattern::Compile(std::string_view pattern) {
  DFLASH_ASSIGN_OR_RETURN(const std::string source, Translate(pattern));
  int error = 0;
  PCRE2_SIZE offset = 0;
  CodePtr code(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(source.data()), source.size(),
                             PCRE2_UTF | PCRE2_UCP, &error, &offset, nullptr));
  if (code == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("regular expression: ", Message(error), ", at \"",
                                                   Shortened(source.substr(std::min(offset, source.size()))),
                                                   "\""));
  }
  uint32_t matches_empty = 0;
  pcre2_pattern_info(code.get(), PCRE2_INFO_MATCHEMPTY, &matches_empty);
  if (matches_empty != 0) {
    return absl::InvalidArgumentError("regular expression: it can match the empty string");
  }
  // Without JIT (a hardened kernel may forbid it) the interpreter gives the same matches, slower.
  (void)pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);
  MatchContextPtr context(pcre2_match_context_create(nullptr));
  if (context == nullptr) return absl::ResourceExhaustedError("regular expression: out of memory");
  pcre2_set_match_limit(context.get(), kMatchLimit);
  pcre2_set_heap_limit(context.get(), kHeapLimitKib);
  return SplitPattern(std::make_unique<const Code>(Code{std::move(code), std::move(context)}));
}

absl::Status SplitPattern::Split(std::string_view text,
                                 absl::FunctionRef<void(std::string_view)> piece) const {
  MatchDataPtr match(pcre2_match_data_create(1, nullptr));
  if (match == nullptr) return absl::ResourceExhaustedError("regular expression: out of memory");
  const PCRE2_SIZE* const bounds = pcre2_get_ovector_pointer(match.get());
  for (size_t pos = 0; pos < text.size();) {
    const int result = pcre2_match(code_->code.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                                   pos, PCRE2_NO_UTF_CHECK, match.get(), code_->context.get());
    if (result == PCRE2_ERROR_NOMATCH) {
      piece(text.substr(pos));
      break;
    }
    // A result of 0 says that the expression has groups for which there is no room; their place is not
    // needed.
    if (result < 0) {
      return absl::ResourceExhaustedError(
          absl::StrCat("regular expression: ", Message(result), ", at byte ", pos, " of the text"));
    }
    const size_t begin = bounds[0], end = bounds[1];
    // Only \K in a lookaround can do this: it moves the begin of the match.
    if (begin < pos || end <= begin)
      return absl::InternalError("regular expression: a match without progress");
    if (begin > pos) piece(text.substr(pos, begin - pos));
    piece(text.substr(begin, end - begin));
    pos = end;
  }
  return absl::OkStatus();
}

}  // namespace dflash
