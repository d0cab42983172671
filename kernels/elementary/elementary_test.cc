// Every function over a dense sample of all float32 bit patterns: within its accuracy of double, and the
// same bits as one lane and in the vector lanes of every instruction set.
#include "kernels/elementary/elementary.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/device/cpu/instruction_set.h"
#include "kernels/elementary/elementary_lanes.h"
#include "kernels/testing/compare.h"

namespace dflash {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Distance of neighbouring floats around the exact value; 2^-149 where results are denormal.
double Ulp(double exact) {
  const int exponent = std::max(std::ilogb(exact), -126);
  return std::ldexp(1.0, exponent - 23);
}

double ErrorInUlps(float actual, double exact) {
  if (std::isnan(exact)) return std::isnan(actual) ? 0 : HUGE_VAL;
  if (std::isnan(actual)) return HUGE_VAL;
  if (std::abs(exact) >= 0x1.ffffffp127) {  // rounds to infinity
    return std::isinf(actual) && std::signbit(actual) == std::signbit(exact) ? 0 : HUGE_VAL;
  }
  if (exact == 0) return actual == 0 ? 0 : HUGE_VAL;
  return std::abs(static_cast<double>(actual) - exact) / Ulp(exact);
}

double ExactExp(double x) { return std::exp(x); }
double ExactLog(double x) { return std::log(x); }
double ExactLog1p(double x) { return std::log1p(x); }
double ExactSigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double ExactSilu(double x) { return x * ExactSigmoid(x); }
double ExactSoftplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

struct Function {
  const char* name;
  float (*scalar)(float);
  double (*exact)(double);
  ElementaryLanes::Function ElementaryLanes::*lanes;
  double max_ulps;
  double max_absolute;  // the other allowance: either is enough
  float highest;        // accuracy is promised up to here; bits are compared everywhere
};

std::vector<Function> Functions() {
  return {
      {"Exp", ExpF32, ExactExp, &ElementaryLanes::exp, 2, 0, kInf},
      {"Log", LogF32, ExactLog, &ElementaryLanes::log, 2, 0, kInf},
      {"Log1p", Log1pF32, ExactLog1p, &ElementaryLanes::log1p, 2, 0, 0x1p100f},
      {"Sigmoid", SigmoidF32, ExactSigmoid, &ElementaryLanes::sigmoid, 4, 0, kInf},
      {"Silu", SiluF32, ExactSilu, &ElementaryLanes::silu, 4, 1e-37, kInf},
      {"Softplus", SoftplusF32, ExactSoftplus, &ElementaryLanes::softplus, 4, 0, kInf},
  };
}

// Every `step`-th bit pattern and, around each power of two and each value that the formulas name, all near
// ones. DFLASHD_EXHAUSTIVE=1 in the environment tests all 2^32 patterns (minutes).
std::vector<float> Inputs(uint64_t first, uint64_t end, uint64_t step) {
  std::vector<float> inputs;
  for (uint64_t bits = first; bits < end; bits += step) {
    inputs.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits)));
  }
  while (inputs.size() % 16 != 0) inputs.push_back(1.0f);
  return inputs;
}

std::vector<float> EdgeInputs() {
  std::vector<float> centers = {0.0f,  88.72284f,   -87.33655f,  -103.97208f, -105.0f, 89.0f,
                                20.0f, 0.70710678f, 1.41421356f, 0.34657359f, kInf};
  for (int exponent = -149; exponent < 128; ++exponent) centers.push_back(std::ldexp(1.0f, exponent));
  std::vector<float> inputs = {kNan};
  for (float center : centers) {
    for (int offset = -40; offset <= 40; ++offset) {
      const uint32_t bits = std::bit_cast<uint32_t>(center) + static_cast<uint32_t>(offset);
      inputs.push_back(std::bit_cast<float>(bits));
      inputs.push_back(-std::bit_cast<float>(bits));
    }
  }
  while (inputs.size() % 16 != 0) inputs.push_back(1.0f);
  return inputs;
}

void Check(const Function& function, const std::vector<float>& x, double* worst) {
  const int64_t count = static_cast<int64_t>(x.size());
  std::vector<float> expected(x.size()), actual(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    expected[i] = function.scalar(x[i]);
    if (x[i] > function.highest) continue;
    const double exact = function.exact(static_cast<double>(x[i]));
    if (std::abs(static_cast<double>(expected[i]) - exact) < function.max_absolute) continue;
    const double error = ErrorInUlps(expected[i], exact);
    *worst = std::max(*worst, error);
    ASSERT_LE(error, function.max_ulps) << function.name << "(" << x[i] << ") = " << expected[i];
  }
  for (InstructionSet set : {InstructionSet::kScalar, InstructionSet::kAvx2, InstructionSet::kAvx512}) {
    if (!IsSupported(set)) continue;
    const ElementaryLanes* lanes = set == InstructionSet::kScalar ? &kElementaryLanesScalar
                                   : set == InstructionSet::kAvx2 ? &kElementaryLanesAvx2
                                                                  : &kElementaryLanesAvx512;
    (lanes->*function.lanes)(x.data(), actual.data(), count);
    for (size_t i = 0; i < x.size(); ++i) {
      ASSERT_TRUE(SameBits(actual[i], expected[i])) << function.name << "(" << x[i] << "), " << Name(set)
                                                    << ": " << actual[i] << " and " << expected[i];
    }
  }
}

TEST(ElementaryTest, AccurateAndTheSameInEveryLane) {
  const bool exhaustive = std::getenv("DFLASHD_EXHAUSTIVE") != nullptr;
  const uint64_t step = exhaustive ? 1 : 2003;  // prime
  constexpr uint64_t kPart = uint64_t{1} << 24;
  for (const Function& function : Functions()) {
    double worst = 0;
    Check(function, EdgeInputs(), &worst);
    for (uint64_t first = 0; first < (uint64_t{1} << 32) && !HasFatalFailure(); first += kPart) {
      Check(function, Inputs(first + first / kPart % step, first + kPart, step), &worst);
    }
    RecordProperty(std::string(function.name) + "_worst_ulps", std::to_string(worst));
  }
}

TEST(ElementaryTest, KnownValues) {
  EXPECT_EQ(ExpF32(0), 1);
  EXPECT_EQ(ExpF32(1), 2.71828183f);
  EXPECT_EQ(ExpF32(kInf), kInf);
  EXPECT_EQ(ExpF32(-kInf), 0);
  EXPECT_EQ(LogF32(1), 0);
  EXPECT_EQ(LogF32(0), -kInf);
  EXPECT_EQ(LogF32(kInf), kInf);
  EXPECT_TRUE(std::isnan(LogF32(-1)));
  EXPECT_EQ(Log1pF32(-1), -kInf);
  EXPECT_EQ(Log1pF32(0), 0);
  EXPECT_EQ(Log1pF32(1e-20f), 1e-20f);
  EXPECT_EQ(SigmoidF32(0), 0.5f);
  EXPECT_EQ(SiluF32(0), 0);
  EXPECT_EQ(SoftplusF32(0), 0.693147181f);
  EXPECT_EQ(SoftplusF32(20.5f), 20.5f);  // the identity from 20 on
  EXPECT_EQ(SoftplusF32(1e30f), 1e30f);
}

}  // namespace
}  // namespace dflash
