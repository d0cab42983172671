// How the checks compare: which rows are looked at, and which of the known forms explains numbers best.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tools/doctor/checks.h"

namespace dflash::doctor {

inline constexpr double kNoMatch = std::numeric_limits<double>::infinity();

// How far a stage is from double precision, and how far it may be.
struct StageError {
  double error = 0;
  double gate = 0;  // Gates::stage, or more where rounding alone moves the stage further (Gates::rounding)

  bool fails() const { return !(error <= gate); }
  // Rounding alone may turn it into anything; without bound, where the stage should give zeros.
  bool tells_nothing() const { return gate > 1; }
  // Keeps the one that says more: a failure, what tells nothing, a pass; of two alike the one that is further
  // past its gate, or nearer to it.
  void Keep(const StageError& other);
};
// Of `ours` against what `stage` gives, which is made of calls of the reference, of inputs that are Rounded.
// Where the error is past Gates::stage, the gate is how far rounding moves the stage, if that is more.
absl::StatusOr<StageError> CompareStage(const Subject& subject, const Rows& ours,
                                        const std::function<absl::StatusOr<Rows>()>& stage);
// Fails an interface, as the model's, where the reference met numbers beyond float32's range since
// DraftReference::ForgetLargest. False: it met none.
bool JudgeRange(const Subject& subject, const char* id);
// Fails an interface, as the model's, whose comparison has numbers beyond float32's range on the side that it
// is measured against: infinity is not equal to itself. False: they are all finite.
bool JudgeFinite(const Subject& subject, const char* id, const Rows& right);
// The finding of an interface whose stages were compared since DraftReference::ForgetLargest. What fails
// with numbers beyond float32's range is the model's. What rounding alone may turn into anything is not
// checked.
void JudgeStage(const Subject& subject, const char* id, const StageError& worst, std::string compared,
                std::string detail, std::string cause);

// At most 40 of [0, rows): both ends and some between. Double precision takes its time.
std::vector<int64_t> Sampled(int64_t rows);
Rows Pick(const Rows& rows, const std::vector<int64_t>& chosen);

// The norm of every head of every row [rows, heads]: rotation leaves it alone.
Rows HeadNorms(const Rows& rows, int64_t head_dim);

// Of the columns that both have: rank 0 holds its own part of the vocabulary only.
double ErrorOfSharedColumns(const Rows& ours, const Rows& golden);

// "golden bundle, prompts 3, 5": what the sequences were held against.
std::string BundlePrompts(const Sequences& sequences);

// The largest `error` among the sequences for which the bundle holds the tensor; none: it holds it for none
// of them, or there is no bundle. Errors: those of GoldenBundle::Tensor.
absl::StatusOr<std::optional<double>> WorstAgainstBundle(
    const Subject& subject, const Sequences& sequences, const std::string& tensor,
    const std::function<double(const SequenceRecord& record, const Rows& golden)>& error);

// The mask that explains the block's attention in a layer: `wanted`, unless another one of `others` does so
// clearly better.
struct Mask {
  bool causal = false;
  int64_t window = 0;  // 0: none

  bool operator==(const Mask&) const = default;
};
struct MaskMatch {
  Mask mask;
  StageError wanted;  // under the wanted mask
};
inline const char* CausalityName(bool causal) { return causal ? "causal" : "bidirectional"; }
absl::StatusOr<MaskMatch> ClosestMask(const Subject& subject, const SequenceRecord& record, size_t layer,
                                      const Mask& wanted, const std::vector<Mask>& others);

// How keys and queries have to be rotated.
Rotation WantedRotation(const Subject& subject);

// The rotation that explains keys best: `wanted` where it does within `gate`, else one of the known mistakes.
struct RotationMatch {
  Rotation rotation;
  double error = 0;
};
RotationMatch ClosestRotation(const Subject& subject, const Rows& unrotated, const Rows& rotated,
                              const std::vector<int64_t>& positions, const Rotation& wanted, double gate);
// Keeps the first match, and the first of those that are not as wanted in its place.
void Keep(const RotationMatch& match, const Rotation& wanted, std::optional<RotationMatch>* kept);

}  // namespace dflash::doctor
