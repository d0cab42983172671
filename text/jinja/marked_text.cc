#include "text/jinja/marked_text.h"

#include <algorithm>

namespace dflash::jinja {

namespace {

size_t CountCodePoints(std::string_view bytes) {
  return static_cast<size_t>(std::count_if(
      bytes.begin(), bytes.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

}  // namespace

MarkedText::MarkedText() {
  static const std::shared_ptr<const Rep>* const kEmpty =
      new std::shared_ptr<const Rep>(std::make_shared<Rep>());
  rep_ = *kEmpty;
}

MarkedText MarkedText::FromTemplate(std::string bytes) {
  MarkedTextBuilder builder;
  builder.Append(bytes, /*is_content=*/false);
  return builder.Build();
}

MarkedText MarkedText::FromContent(std::string bytes) {
  MarkedTextBuilder builder;
  builder.Append(bytes, /*is_content=*/true);
  return builder.Build();
}

MarkedText MarkedText::Substring(size_t begin, size_t end) const {
  if (begin == 0 && end == size()) return *this;
  MarkedTextBuilder builder;
  builder.Append(*this, begin, end);
  return builder.Build().WithMarkup(markup_);
}

void MarkedTextBuilder::Mark(size_t begin, size_t end) {
  if (begin == end) return;
  if (!content_.empty() && content_.back().end == begin) {
    content_.back().end = end;
  } else {
    content_.push_back({begin, end});
  }
}

void MarkedTextBuilder::Append(std::string_view bytes, bool is_content) {
  if (is_content) Mark(bytes_.size(), bytes_.size() + bytes.size());
  bytes_.append(bytes);
}

void MarkedTextBuilder::Append(const MarkedText& text, size_t begin, size_t end) {
  const std::vector<ByteRange>& ranges = text.content();
  auto range = std::lower_bound(ranges.begin(), ranges.end(), begin,
                                [](const ByteRange& r, size_t offset) { return r.end <= offset; });
  for (; range != ranges.end() && range->begin < end; ++range) {
    Mark(bytes_.size() + std::max(range->begin, begin) - begin,
         bytes_.size() + std::min(range->end, end) - begin);
  }
  bytes_.append(text.bytes().substr(begin, end - begin));
}

MarkedText MarkedTextBuilder::Build() {
  auto rep = std::make_shared<MarkedText::Rep>();
  rep->bytes = std::move(bytes_);
  rep->content = std::move(content_);
  rep->code_points = CountCodePoints(rep->bytes);
  bytes_.clear();
  content_.clear();
  return MarkedText(std::move(rep));
}

}  // namespace dflash::jinja
