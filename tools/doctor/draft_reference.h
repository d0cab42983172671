// The drafter in double precision, piece by piece: each function takes what the serving path had before a
// stage and computes what it must have after it, so that one wrong stage shows at that stage alone.
// Nothing here is shared with the serving path but the readers of files. Source: docs/spec/dflash.md "Forward
// pass", "Attention masks and the sliding window".
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/golden/rows.h"
#include "worker/model/checkpoint.h"
#include "worker/model/draft_config.h"

namespace dflash::doctor {

using golden::RelativeError;
using golden::Rows;

// How far honest arithmetic may be from double precision, of every number that a stage reads, passes from one
// operation to the next, or returns.
struct Rounding {
  double number = 0;  // of a number that is kept, relative to it
  // Of a sum of n terms t, relative to sqrt(n sum t^2). Each addition rounds the sum so far, which in
  // whatever order is about as large as the terms' root sum of squares, and n such errors add up like a
  // random walk. That is never less than sum |t|, and does not shrink where terms cancel.
  double sum = 0;
};

// How c could be made of taps; only kPlain is right.
enum class FusionForm : uint8_t { kPlain, kOnePlus, kUnnormed };

// How a head could be rotated.
struct Rotation {
  double theta = 0;
  double fraction = 1;  // of a head
  int64_t shift = 0;    // added to the position
  bool interleaved = false;

  bool operator==(const Rotation&) const = default;
};

// Keys and values of one layer; row i is position first_position + i.
struct LayerContext {
  Rows k, v;
  int64_t first_position = 0;
};

class DraftReference {
 public:
  // Nothing is owned. Weights are read when they are first needed and kept. rms_norm_eps is the
  // configuration's.
  DraftReference(const DraftConfig& config, const DraftCheckpoint& drafter, const TargetCheckpoint& target)
      : config_(config), drafter_(drafter), target_(target) {}

  // What `stage`, made of calls of this class, gives when rounding moves every number up or down: by all that
  // `rounding` allows, and by fixed pseudo-random signs, others for another `seed`.
  absl::StatusOr<Rows> Moved(const Rounding& rounding, uint64_t seed,
                             const std::function<absl::StatusOr<Rows>()>& stage);
  // Inputs of a stage: inside Moved they are moved, elsewhere they are as they are.
  Rows Rounded(Rows rows);

  // c of taps [T, K * D].
  absl::StatusOr<Rows> Features(const Rows& taps, FusionForm form = FusionForm::kPlain);
  // Of context features, or of normed block rows: keys after k_norm and before rotation; values.
  absl::StatusOr<Rows> Keys(size_t layer, const Rows& x);
  absl::StatusOr<Rows> Values(size_t layer, const Rows& x);
  absl::StatusOr<Rows> Queries(size_t layer, const Rows& x);
  // norm(h; input_layernorm)
  absl::StatusOr<Rows> InputNorm(size_t layer, const Rows& h);
  // Rotates all heads of every row to positions[row].
  Rows Rotate(const Rows& rows, const std::vector<int64_t>& positions, const Rotation& rotation);
  // The attention of block rows at positions [start, start + rows): context, then the block itself.
  Rows Attend(const Rows& q, const Rows& k, const Rows& v, int64_t start, const LayerContext& context,
              const DraftLayerMask& mask);
  // The residual behind the layer, from the one before it and the attention's output.
  absl::StatusOr<Rows> LayerOutput(size_t layer, const Rows& h, const Rows& attended);
  // The final norm.
  absl::StatusOr<Rows> Output(const Rows& h);
  // Rows of the target's embedding.
  absl::StatusOr<Rows> Embedding(const std::vector<int32_t>& ids);
  // Columns of the logits: y against rows [first, first + count) of the target's head.
  absl::StatusOr<Rows> Logits(const Rows& y, int64_t first, int64_t count);
  // One row of the target's head.
  absl::StatusOr<Rows> HeadRow(int64_t id);
  // How far rounding may move the logit of a token, from y [1, D].
  absl::StatusOr<double> LogitRounding(const Rounding& rounding, const Rows& y, int64_t id);

  // The largest number that came up since the last call of ForgetLargest, squares that a norm sums up
  // and, inside Moved, terms of sums included; infinite where one was none. Beyond float32's range the
  // serving path cannot follow.
  double largest() const { return largest_; }
  bool fits_float32() const { return largest_ <= std::numeric_limits<float>::max(); }
  void ForgetLargest() { largest_ = 0; }

  const DraftConfig& config() const { return config_; }

 private:
  absl::StatusOr<const std::vector<float>*> Weight(const std::string& name);
  absl::StatusOr<Rows> Linear(const Rows& x, const std::string& weight);
  absl::StatusOr<Rows> Norm(const Rows& x, const std::string& weight, double offset = 0);
  // Over heads of head_dim.
  absl::StatusOr<Rows> HeadNorm(Rows x, const std::string& weight);
  absl::StatusOr<std::vector<float>> HeadRows(int64_t first, int64_t count);
  // x times the transpose of w [cols, x.cols].
  Rows Product(const Rows& x, const std::vector<float>& w, int64_t cols);
  void NormInto(const double* x, const std::vector<float>& w, double offset, int64_t dim, double* y);
  void Note(double value);
  void Note(const Rows& rows);
  double Sign();  // 1 or -1, inside Moved
  // Moved by rounding, as Rounded. A sum has `count` terms, and that sum of squares.
  double RoundedNumber(double value);
  double RoundedSum(double sum, double squares, int64_t count);

  const DraftConfig& config_;
  const DraftCheckpoint& drafter_;
  const TargetCheckpoint& target_;
  std::map<std::string, std::vector<float>> weights_;
  double largest_ = 0;
  Rounding rounding_;        // inside Moved
  uint64_t sign_state_ = 0;  // of the pseudo-random signs; 0: not inside Moved
};

}  // namespace dflash::doctor
