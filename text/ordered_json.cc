#include "text/ordered_json.h"

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace dflash {
namespace {

using Json = nlohmann::ordered_json;

// Looks at a document without building it and stops at the first thing that is out of bounds.
class BoundsChecker : public nlohmann::json_sax<Json> {
 public:
  explicit BoundsChecker(const OrderedJsonLimits& limits) : limits_(limits) {}

  const std::string& error() const { return error_; }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t value) override {
    return value <= static_cast<number_unsigned_t>(INT64_MAX) || Fail("an integer above 2^63 - 1");
  }
  bool number_float(number_float_t, const string_t& digits) override {
    return digits.find_first_of(".eE") != std::string::npos || Fail("an integer of more than 64 bits");
  }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return Fail("a binary value"); }
  bool start_object(size_t) override { return Open(); }
  bool key(string_t&) override {
    return ++keys_.back() <= limits_.max_keys ||
           Fail(absl::StrCat("an object of more than ", limits_.max_keys, " keys"));
  }
  bool end_object() override { return Close(); }
  bool start_array(size_t) override { return Open(); }
  bool end_array() override { return Close(); }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: ..."
    const std::string what = error.what();
    const size_t tag_end = what.find("] ");
    return Fail(absl::StrCat("not JSON (byte ", position,
                             "): ", tag_end == std::string::npos ? what : what.substr(tag_end + 2)));
  }

 private:
  bool Fail(std::string error) {
    error_ = std::move(error);
    return false;
  }
  bool Open() {
    keys_.push_back(0);
    return keys_.size() <= limits_.max_depth || Fail(absl::StrCat("nests deeper than ", limits_.max_depth));
  }
  bool Close() {
    keys_.pop_back();
    return true;
  }

  const OrderedJsonLimits& limits_;
  std::vector<size_t> keys_;  // so far, of each open object
  std::string error_;
};

}  // namespace

absl::StatusOr<Json> ParseOrderedJson(std::string_view text, std::string_view origin,
                                      const OrderedJsonLimits& limits) {
  const std::string where(origin);
  if (text.size() > limits.max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": ", text.size(), " bytes of JSON, at most ", limits.max_bytes, " are allowed"));
  }
  BoundsChecker checker(limits);
  if (!Json::sax_parse(text, &checker)) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": ", checker.error()));
  }
  return Json::parse(text, nullptr, /*allow_exceptions=*/false);
}

}  // namespace dflash
