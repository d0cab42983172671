// What a load is made of: how many tokens, which prompts, when. Everything is a function of a seed, so a load
// can be had again.
#pragma once

#include <cstdint>
#include <random>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "dflash/v1/generation.pb.h"

namespace dflash::ctl {

// A uniform number in [0, 1), the same on every machine.
double Uniform(std::mt19937_64& random);

// How a count is distributed.
class CountDistribution {
 public:
  // "N", "uniform:MIN:MAX", "exponential:MEAN:MAX" or "lognormal:MEDIAN:SIGMA:MAX"; counts are whole numbers
  // from 1 to MAX, and MAX is at most `limit`. InvalidArgument says what is expected.
  static absl::StatusOr<CountDistribution> Parse(std::string_view text, int64_t limit);
  int64_t Draw(std::mt19937_64& random) const;

 private:
  enum class Kind { kUniform, kExponential, kLogNormal } kind_ = Kind::kUniform;
  double center_ = 0;  // mean or median
  double sigma_ = 0;
  int64_t min_ = 1, max_ = 1;
};

// Arrivals that know nothing of each other: a Poisson process.
class PoissonArrivals {
 public:
  PoissonArrivals(double per_second, uint64_t seed) : per_second_(per_second), random_(seed) {}
  // Seconds since the beginning; ascending.
  double Next();

 private:
  const double per_second_;
  double at_ = 0;
  std::mt19937_64 random_;
};

struct LoadShape {
  // Prompts are cut out of `text`, at random places; without text they are random tokens below `vocabulary`.
  // When `whole` is not empty they are these, as they are, chosen at random.
  CountDistribution prompt_tokens;
  std::vector<uint32_t> text;
  uint32_t vocabulary = 0;
  std::vector<std::vector<uint32_t>> whole;
  CountDistribution output_tokens;
  // Every prompt begins with one of so many prefixes of so many tokens, on top of prompt_tokens.
  int64_t prefixes = 1;
  int64_t prefix_tokens = 0;
  uint64_t seed = 1;
};

class RequestMaker {
 public:
  // `base` has all that the requests share.
  RequestMaker(LoadShape shape, v1::GenerateRequest base);
  // Request `index` of this load, by itself.
  v1::GenerateRequest Make(uint64_t index) const;

 private:
  void Cut(std::mt19937_64& random, int64_t count, v1::TokenIds* prompt) const;

  const LoadShape shape_;
  const v1::GenerateRequest base_;
  std::vector<v1::TokenIds> prefixes_;
};

}  // namespace dflash::ctl
