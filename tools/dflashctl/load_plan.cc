#include "tools/dflashctl/load_plan.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numbers>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace dflash::ctl {
namespace {

// Neighbouring seeds give generators that have nothing to do with each other.
std::mt19937_64 Generator(uint64_t seed, uint64_t stream, uint64_t index) {
  std::seed_seq sequence = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                            static_cast<uint32_t>(stream), static_cast<uint32_t>(index),
                            static_cast<uint32_t>(index >> 32)};
  return std::mt19937_64(sequence);
}
constexpr uint64_t kRequests = 1, kPrefixes = 2;

int64_t Below(std::mt19937_64& random, int64_t count) {
  return static_cast<int64_t>(Uniform(random) * static_cast<double>(count));
}

bool ReadNumber(std::string_view text, double* number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *number);
  return error == std::errc() && end == text.data() + text.size() && std::isfinite(*number);
}

}  // namespace

double Uniform(std::mt19937_64& random) { return static_cast<double>(random() >> 11) * 0x1p-53; }

absl::StatusOr<CountDistribution> CountDistribution::Parse(std::string_view text, int64_t limit) {
  std::vector<std::string_view> parts;
  for (size_t at = 0;;) {
    const size_t colon = text.find(':', at);
    parts.push_back(text.substr(at, colon - at));
    if (colon == std::string_view::npos) break;
    at = colon + 1;
  }
  const absl::Status bad = absl::InvalidArgumentError(absl::StrCat(
      "must be N, uniform:MIN:MAX, exponential:MEAN:MAX or lognormal:MEDIAN:SIGMA:MAX with whole "
      "counts from 1 to ",
      limit, ", not '", std::string(text), "'"));
  std::vector<double> numbers(parts.size());
  const size_t first = parts.size() == 1 ? 0 : 1;
  for (size_t i = first; i < parts.size(); ++i) {
    if (!ReadNumber(parts[i], &numbers[i])) return bad;
  }
  const double max = numbers.back();
  if (max < 1 || max > static_cast<double>(limit) || max != std::floor(max)) return bad;
  CountDistribution result;
  result.max_ = static_cast<int64_t>(max);
  if (parts.size() == 1) {
    result.min_ = result.max_;
    return result;
  }
  result.center_ = numbers[1];
  if (result.center_ < 1 || result.center_ > max) return bad;
  if (parts[0] == "uniform" && parts.size() == 3 && result.center_ == std::floor(result.center_)) {
    result.min_ = static_cast<int64_t>(result.center_);
    return result;
  }
  if (parts[0] == "exponential" && parts.size() == 3) {
    result.kind_ = Kind::kExponential;
    return result;
  }
  if (parts[0] == "lognormal" && parts.size() == 4 && numbers[2] >= 0 && numbers[2] <= 10) {
    result.kind_ = Kind::kLogNormal;
    result.sigma_ = numbers[2];
    return result;
  }
  return bad;
}

int64_t CountDistribution::Draw(std::mt19937_64& random) const {
  double count = 0;
  switch (kind_) {
    case Kind::kUniform:
      return min_ + Below(random, max_ - min_ + 1);
    case Kind::kExponential:
      count = -std::log1p(-Uniform(random)) * center_;
      break;
    case Kind::kLogNormal: {
      const double radius = std::sqrt(-2 * std::log1p(-Uniform(random)));  // Box and Muller
      count = center_ * std::exp(sigma_ * radius * std::cos(2 * std::numbers::pi * Uniform(random)));
      break;
    }
  }
  return static_cast<int64_t>(std::clamp(std::round(count), 1.0, static_cast<double>(max_)));
}

double PoissonArrivals::Next() {
  at_ += -std::log1p(-Uniform(random_)) / per_second_;
  return at_;
}

RequestMaker::RequestMaker(LoadShape shape, v1::GenerateRequest base)
    : shape_(std::move(shape)), base_(std::move(base)) {
  DFLASH_CHECK(!shape_.whole.empty() || !shape_.text.empty() || shape_.vocabulary > 0);
  for (int64_t i = 0; shape_.prefix_tokens > 0 && i < shape_.prefixes; ++i) {
    std::mt19937_64 random = Generator(shape_.seed, kPrefixes, static_cast<uint64_t>(i));
    Cut(random, shape_.prefix_tokens, &prefixes_.emplace_back());
  }
}

void RequestMaker::Cut(std::mt19937_64& random, int64_t count, v1::TokenIds* prompt) const {
  const auto size = static_cast<int64_t>(shape_.text.size());
  int64_t at = size > 0 ? Below(random, size) : 0;
  for (int64_t i = 0; i < count; ++i) {
    prompt->add_ids(size > 0 ? shape_.text[static_cast<size_t>(at++ % size)]
                             : static_cast<uint32_t>(Below(random, shape_.vocabulary)));
  }
}

v1::GenerateRequest RequestMaker::Make(uint64_t index) const {
  std::mt19937_64 random = Generator(shape_.seed, kRequests, index);
  v1::GenerateRequest request = base_;
  v1::TokenIds* prompt = request.mutable_tokens();
  if (!prefixes_.empty()) *prompt = prefixes_[static_cast<size_t>(Below(random, shape_.prefixes))];
  if (!shape_.whole.empty()) {
    const auto choice = static_cast<size_t>(Below(random, static_cast<int64_t>(shape_.whole.size())));
    prompt->mutable_ids()->Add(shape_.whole[choice].begin(), shape_.whole[choice].end());
  } else {
    Cut(random, shape_.prompt_tokens.Draw(random), prompt);
  }
  request.mutable_stopping()->set_max_tokens(static_cast<uint32_t>(shape_.output_tokens.Draw(random)));
  request.mutable_sampling()->set_seed(index);
  return request;
}

}  // namespace dflash::ctl
