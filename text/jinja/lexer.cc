#include "text/jinja/lexer.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <utility>

#include "text/jinja/runtime.h"
#include "text/jinja/unicode.h"

namespace dflash::jinja {

namespace {

bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsNameStart(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

std::string NormalizeNewlines(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      out.push_back('\n');
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    } else {
      out.push_back(source[i]);
    }
  }
  return out;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(source) {}

  absl::StatusOr<std::vector<Token>> Run() {
    while (position_ < source_.size()) DFLASH_RETURN_IF_ERROR(LexDataAndTag());
    Add(Token::Kind::kEnd);
    return std::move(tokens_);
  }

 private:
  template <typename... Parts>
  absl::Status Error(const Parts&... parts) const {
    return absl::InvalidArgumentError(absl::StrCat("line ", line_, ": ", parts...));
  }
  template <typename... Parts>
  absl::Status Unsupported(const Parts&... parts) const {
    return absl::UnimplementedError(absl::StrCat("line ", line_, ": ", parts...));
  }

  Token& Add(Token::Kind kind, std::string_view text = {}) {
    tokens_.push_back(Token{.kind = kind, .line = line_, .text = std::string(text)});
    return tokens_.back();
  }

  std::string_view Rest() const { return source_.substr(position_); }
  bool At(std::string_view text) const { return Rest().starts_with(text); }

  void Advance(size_t bytes) {
    const std::string_view passed = source_.substr(position_, bytes);
    line_ += static_cast<int>(std::count(passed.begin(), passed.end(), '\n'));
    position_ += bytes;
    at_line_start_ = !passed.empty() && passed.back() == '\n';
  }

  size_t SpaceAt(size_t offset) const {
    size_t end = offset;
    while (end < source_.size()) {
      const CodePoint code_point = DecodeUtf8(source_, end);
      if (!IsSpace(code_point.value)) break;
      end += code_point.size;
    }
    return end - offset;
  }

  static std::string_view TrimEnd(std::string_view text) {
    while (!text.empty()) {
      const size_t previous = PreviousBoundary(text, text.size());
      if (!IsSpace(DecodeUtf8(text, previous).value)) break;
      text = text.substr(0, previous);
    }
    return text;
  }

  // Text up to the next tag, then that tag.
  absl::Status LexDataAndTag() {
    size_t begin = position_;
    while (true) {
      begin = source_.find('{', begin);
      if (begin == std::string_view::npos || begin + 1 >= source_.size()) {
        Add(Token::Kind::kData, Rest());
        Advance(Rest().size());
        return absl::OkStatus();
      }
      const char kind = source_[begin + 1];
      if (kind == '{' || kind == '%' || kind == '#') break;
      ++begin;
    }
    const char kind = source_[begin + 1];
    const char sign = begin + 2 < source_.size() ? source_[begin + 2] : ' ';
    std::string_view text = source_.substr(position_, begin - position_);
    if (sign == '-') {
      text = TrimEnd(text);
    } else if (sign != '+' && kind != '{') {  // lstrip_blocks: a tag alone on its line loses its indentation
      const size_t line_begin = text.rfind('\n') + 1;  // npos + 1 = 0
      if ((line_begin > 0 || at_line_start_) && TrimEnd(text.substr(line_begin)).empty()) {
        text = text.substr(0, line_begin);
      }
    }
    if (!text.empty()) Add(Token::Kind::kData, text);
    Advance(begin - position_ + 2 + (sign == '-' || sign == '+' ? 1 : 0));
    if (kind == '#') return LexComment();
    return LexTag(kind == '{');
  }

  absl::Status LexComment() {
    const size_t end = Rest().find("#}");
    if (end == std::string_view::npos) return Error("missing end of comment tag");
    const bool trims_space = end > 0 && Rest()[end - 1] == '-';
    const bool keeps_newline = end > 0 && Rest()[end - 1] == '+';
    Advance(end + 2);
    FinishTag(trims_space, !keeps_newline);
    return absl::OkStatus();
  }

  // What an end tag swallows after itself: all white space, or one newline (trim_blocks).
  void FinishTag(bool trims_space, bool trims_newline) {
    if (trims_space) {
      if (const size_t space = SpaceAt(position_); space > 0) Advance(space);
    } else if (trims_newline && At("\n")) {
      Advance(1);
    }
  }

  absl::Status LexTag(bool is_variable) {
    const std::string_view end = is_variable ? "}}" : "%}";
    Add(is_variable ? Token::Kind::kVariableBegin : Token::Kind::kBlockBegin);
    const size_t first_token = tokens_.size();
    std::string open;  // brackets not yet closed; a tag ends only outside of them
    while (true) {
      if (open.empty()) {
        const bool trims_space = At("-") && Rest().substr(1).starts_with(end);
        const bool keeps_newline = !is_variable && At("+") && Rest().substr(1).starts_with(end);
        if (trims_space || keeps_newline || At(end)) {
          Add(is_variable ? Token::Kind::kVariableEnd : Token::Kind::kBlockEnd);
          Advance(end.size() + (trims_space || keeps_newline ? 1 : 0));
          FinishTag(trims_space, !is_variable && !keeps_newline);
          return absl::OkStatus();
        }
      }
      if (position_ >= source_.size()) return Error("the template ends inside a tag");
      DFLASH_RETURN_IF_ERROR(LexToken(&open));
      if (!is_variable && tokens_.size() == first_token + 1 && tokens_.back().kind == Token::Kind::kName &&
          tokens_.back().text == "raw") {
        return Unsupported("raw blocks are not supported");
      }
    }
  }

  absl::Status LexToken(std::string* open) {
    if (const size_t space = SpaceAt(position_); space > 0) {
      Advance(space);
      return absl::OkStatus();
    }
    const char c = source_[position_];
    if (IsDigit(c)) return LexNumber();
    if (IsNameStart(c)) {
      size_t end = position_;
      while (end < source_.size() && (IsNameStart(source_[end]) || IsDigit(source_[end]))) ++end;
      if (end < source_.size() && (source_[end] & 0x80) != 0)
        return Unsupported("names outside ASCII are not supported");
      Add(Token::Kind::kName, source_.substr(position_, end - position_));
      Advance(end - position_);
      return absl::OkStatus();
    }
    if (c == '\'' || c == '"') return LexString();
    if ((c & 0x80) != 0) return Unsupported("names outside ASCII are not supported");
    for (const std::string_view op : {"//", "**", "==", "!=", ">=", "<="}) {
      if (!At(op)) continue;
      Add(Token::Kind::kOperator, op);
      Advance(op.size());
      return absl::OkStatus();
    }
    if (std::string_view("+-/*%~[](){}><=.:|,;").find(c) == std::string_view::npos) {
      return Error("unexpected character '", std::string(1, c), "'");
    }
    if (c == '(' || c == '[' || c == '{') {
      open->push_back(c == '(' ? ')' : c == '[' ? ']' : '}');
    } else if (c == ')' || c == ']' || c == '}') {
      if (open->empty()) return Error("unexpected '", std::string(1, c), "'");
      if (open->back() != c) {
        return Error("unexpected '", std::string(1, c), "', expected '", std::string(1, open->back()), "'");
      }
      open->pop_back();
    }
    Add(Token::Kind::kOperator, source_.substr(position_, 1));
    Advance(1);
    return absl::OkStatus();
  }

  // Digits of the base, single underscores allowed between them, from `offset` on; appends them to `digits`.
  size_t Digits(size_t offset, int base, std::string* digits) const {
    const auto is_digit = [base](char c) {
      if (IsDigit(c)) return c - '0' < base;
      return base == 16 && ((c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'));
    };
    size_t end = offset;
    while (end < source_.size()) {
      const bool underscore = source_[end] == '_' && end > offset;
      const size_t digit = end + (underscore ? 1 : 0);
      if (digit >= source_.size() || !is_digit(source_[digit])) break;
      digits->push_back(source_[digit]);
      end = digit + 1;
    }
    return end;
  }

  absl::Status LexNumber() {
    std::string digits;
    const bool after_dot = source_[position_ - 1] == '.';  // a tag precedes: there is a character before
    size_t end = Digits(position_, 10, &digits);
    std::string number = digits;
    bool is_float = false;
    if (!after_dot) {  // x.1.2 is two subscripts, not a float
      if (end + 1 < source_.size() && source_[end] == '.' && IsDigit(source_[end + 1])) {
        number.push_back('.');
        end = Digits(end + 1, 10, &number);
        is_float = true;
      }
      if (end < source_.size() && (source_[end] == 'e' || source_[end] == 'E')) {
        size_t exponent = end + 1;
        std::string part = "e";
        if (exponent < source_.size() && (source_[exponent] == '+' || source_[exponent] == '-')) {
          part.push_back(source_[exponent++]);
        }
        if (exponent < source_.size() && IsDigit(source_[exponent])) {
          end = Digits(exponent, 10, &part);
          number += part;
          is_float = true;
        }
      }
    }
    if (is_float) {
      Add(Token::Kind::kFloat).number = std::strtod(number.c_str(), nullptr);
      Advance(end - position_);
      return absl::OkStatus();
    }
    int base = 10;
    if (source_[position_] == '0') {
      const char prefix =
          position_ + 1 < source_.size() ? static_cast<char>(source_[position_ + 1] | 0x20) : ' ';
      base = prefix == 'x' ? 16 : prefix == 'o' ? 8 : prefix == 'b' ? 2 : 10;
      if (base != 10) {
        digits.clear();
        size_t first = position_ + 2;
        if (first < source_.size() && source_[first] == '_') ++first;
        end = Digits(first, base, &digits);
        if (digits.empty()) return Error("a number without digits");
      } else if (digits.find_first_not_of('0') != std::string::npos) {
        return Error("a decimal number cannot start with 0");
      }
    }
    int64_t value = 0;
    if (std::from_chars(digits.data(), digits.data() + digits.size(), value, base).ec != std::errc()) {
      return Unsupported("integers beyond 64 bits are not supported");
    }
    Add(Token::Kind::kInteger).integer = value;
    Advance(end - position_);
    return absl::OkStatus();
  }

  absl::Status LexString() {
    const char quote = source_[position_];
    std::string value;
    size_t offset = position_ + 1;
    while (true) {
      if (offset >= source_.size()) return Error("a string without its closing quote");
      const char c = source_[offset];
      if (c == quote) break;
      if (c != '\\') {
        value.push_back(c);
        ++offset;
        continue;
      }
      if (offset + 1 >= source_.size()) return Error("a string without its closing quote");
      DFLASH_ASSIGN_OR_RETURN(offset, LexEscape(offset, &value));
    }
    Add(Token::Kind::kString, value);
    Advance(offset + 1 - position_);
    return absl::OkStatus();
  }

  // The escape sequence whose backslash is at `offset`, by Python's rules; returns the offset after it.
  absl::StatusOr<size_t> LexEscape(size_t offset, std::string* value) const {
    const char c = source_[offset + 1];
    static constexpr std::pair<char, char> kSimple[] = {{'n', '\n'}, {'t', '\t'},  {'r', '\r'}, {'\\', '\\'},
                                                        {'"', '"'},  {'\'', '\''}, {'a', '\a'}, {'b', '\b'},
                                                        {'f', '\f'}, {'v', '\v'}};
    for (const auto& [letter, result] : kSimple) {
      if (c != letter) continue;
      value->push_back(result);
      return offset + 2;
    }
    if (c == '\n') return offset + 2;  // a line continued
    if (c >= '0' && c <= '7') {
      char32_t code = 0;
      size_t end = offset + 1;
      for (; end < offset + 4 && end < source_.size() && source_[end] >= '0' && source_[end] <= '7'; ++end) {
        code = code * 8 + static_cast<char32_t>(source_[end] - '0');
      }
      AppendUtf8(code, value);
      return end;
    }
    const size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    if (digits > 0) {
      const std::string_view hex = source_.substr(std::min(offset + 2, source_.size()), digits);
      uint32_t code = 0;
      const auto [end, error] = std::from_chars(hex.data(), hex.data() + hex.size(), code, 16);
      if (hex.size() != digits || error != std::errc() || end != hex.data() + hex.size()) {
        return Error("truncated \\", std::string(1, c), " escape in a string");
      }
      if (code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) {
        return Error("a string escape that is no Unicode character");
      }
      AppendUtf8(code, value);
      return offset + 2 + digits;
    }
    if (c == 'N') return Unsupported("\\N escapes in strings are not supported");
    value->push_back('\\');  // Python keeps the backslash of an unknown escape
    return offset + 1;
  }

  std::string_view source_;
  size_t position_ = 0;
  int line_ = 1;
  bool at_line_start_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

absl::StatusOr<std::vector<Token>> Tokenize(std::string_view source) {
  std::string normalized = NormalizeNewlines(source);
  if (normalized.ends_with('\n')) normalized.pop_back();  // Jinja drops one newline at the end of a template
  return Lexer(normalized).Run();
}

}  // namespace dflash::jinja
