// A string that knows which of its bytes came from outside (message content, tools, arguments of the request)
// and which from the template. The mark follows the bytes through every operation of the interpreter, so that
// a rendered prompt can be tokenized with added tokens recognised in template text only.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/jinja/unicode.h"

namespace dflash::jinja {

// The half-open byte range [begin, end).
struct ByteRange {
  size_t begin;
  size_t end;
  bool operator==(const ByteRange&) const = default;
};

// Immutable, valid UTF-8, cheap to copy (the bytes are shared), safe to read from any thread.
class MarkedText {
 public:
  MarkedText();
  // `bytes` must be valid UTF-8.
  static MarkedText FromTemplate(std::string bytes);
  static MarkedText FromContent(std::string bytes);

  std::string_view bytes() const { return rep_->bytes; }
  size_t size() const { return rep_->bytes.size(); }
  bool empty() const { return rep_->bytes.empty(); }
  // The marked bytes: ascending, disjoint, not touching each other, not empty.
  const std::vector<ByteRange>& content() const { return rep_->content; }

  size_t code_points() const { return rep_->code_points; }
  bool ascii() const { return rep_->code_points == rep_->bytes.size(); }

  // The bytes [begin, end), both at character boundaries.
  MarkedText Substring(size_t begin, size_t end) const;

  // Jinja's Markup: what the filters `safe` and `escape` return. Adding a plain string to one escapes the
  // string.
  bool markup() const { return markup_; }
  MarkedText WithMarkup(bool markup) const {
    MarkedText copy = *this;
    copy.markup_ = markup;
    return copy;
  }

 private:
  friend class MarkedTextBuilder;
  struct Rep {
    std::string bytes;
    std::vector<ByteRange> content;
    size_t code_points = 0;
  };
  explicit MarkedText(std::shared_ptr<const Rep> rep) : rep_(std::move(rep)) {}

  std::shared_ptr<const Rep> rep_;
  bool markup_ = false;
};

class MarkedTextBuilder {
 public:
  void Append(std::string_view bytes, bool is_content);
  void Append(const MarkedText& text) { Append(text, 0, text.size()); }
  // Appends the bytes [begin, end) of `text`, both at character boundaries.
  void Append(const MarkedText& text, size_t begin, size_t end);

  size_t size() const { return bytes_.size(); }
  // Returns the text and leaves the builder empty.
  MarkedText Build();

 private:
  void Mark(size_t begin, size_t end);

  std::string bytes_;
  std::vector<ByteRange> content_;
};

// Calls `map(code_point, &out)` for every character, in order; what it appends to `out` (valid UTF-8) takes
// the character's mark. The result is not markup.
template <typename Map>
MarkedText MapCharacters(const MarkedText& text, const Map& map) {
  MarkedTextBuilder builder;
  std::string run;
  size_t offset = 0;
  const auto map_until = [&](size_t end, bool is_content) {
    while (offset < end) {
      const CodePoint code_point = DecodeUtf8(text.bytes(), offset);
      map(code_point.value, &run);
      offset += code_point.size;
    }
    builder.Append(run, is_content);
    run.clear();
  };
  for (const ByteRange& range : text.content()) {
    map_until(range.begin, /*is_content=*/false);
    map_until(range.end, /*is_content=*/true);
  }
  map_until(text.size(), /*is_content=*/false);
  return builder.Build();
}

}  // namespace dflash::jinja
