#include "text/stop_matcher.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "text/utf8.h"

namespace dflash {

absl::StatusOr<StopMatcher> StopMatcher::Create(std::vector<std::string> strings) {
  if (strings.size() > kMaxStrings) {
    return absl::InvalidArgumentError(
        absl::StrCat("stop strings: ", strings.size(), " of them, at most ", kMaxStrings));
  }
  StopMatcher matcher;
  for (std::string& string : strings) {
    const auto invalid = [&](const char* what) {
      return absl::InvalidArgumentError(absl::StrCat("stop strings[", matcher.patterns_.size(), "]: ", what));
    };
    if (string.empty()) return invalid("empty");
    if (string.size() > kMaxStringBytes) {
      return invalid(absl::StrCat("longer than ", kMaxStringBytes, " bytes").c_str());
    }
    if (ReplaceIllFormed(string) != string) return invalid("not UTF-8");
    Pattern pattern;
    pattern.borders.assign(string.size() + 1, 0);
    for (size_t length = 2, border = 0; length <= string.size(); ++length) {
      while (border > 0 && string[length - 1] != string[border]) border = pattern.borders[border];
      if (string[length - 1] == string[border]) ++border;
      pattern.borders[length] = static_cast<uint16_t>(border);
    }
    pattern.string = std::move(string);
    matcher.patterns_.push_back(std::move(pattern));
  }
  return matcher;
}

StopMatcher::Result StopMatcher::Feed(std::string_view chunk) {
  Result result;
  if (stopped_) return result;
  for (size_t i = 0; i < chunk.size(); ++i) {
    const Pattern* complete = nullptr;
    for (Pattern& pattern : patterns_) {
      while (pattern.matched > 0 && pattern.string[pattern.matched] != chunk[i]) {
        pattern.matched = pattern.borders[pattern.matched];
      }
      if (pattern.string[pattern.matched] == chunk[i]) ++pattern.matched;
      if (pattern.matched == pattern.string.size() &&
          (complete == nullptr || pattern.matched > complete->matched)) {
        complete = &pattern;
      }
    }
    if (complete == nullptr) continue;
    stopped_ = true;
    held_.append(chunk.substr(0, i + 1));
    held_.resize(held_.size() - complete->matched);
    returned_ += held_.size();
    result.text = std::exchange(held_, {});
    result.match = Match{static_cast<size_t>(complete - patterns_.data()), returned_, i + 1};
    return result;
  }
  held_.append(chunk);
  size_t keep = 0;
  for (const Pattern& pattern : patterns_) keep = std::max(keep, pattern.matched);
  result.text = held_.substr(0, held_.size() - keep);
  held_.erase(0, result.text.size());
  returned_ += result.text.size();
  return result;
}

std::string StopMatcher::Finish() { return std::exchange(held_, {}); }

}  // namespace dflash
