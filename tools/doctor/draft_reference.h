// The drafter in double precision, piece by piece: each function takes what the serving path had before a
// stage and computes what it must have after it, so that one wrong stage shows at that stage alone.
// Nothing here is shared with the serving path but the readers of files. Source: docs/spec/dflash.md "Forward
// pass", "Attention masks and the sliding window".
#pragma once

#include <cstdint>
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

// The rows with every value moved by a relative `unit` up or down, by fixed pseudo-random signs.
Rows Disturbed(Rows rows, double unit);

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

  // c of taps [T, K * D].
  absl::StatusOr<Rows> Features(const Rows& taps, FusionForm form = FusionForm::kPlain);
  // Of context features, or of normed block rows: keys after k_norm and before rotation; values.
  absl::StatusOr<Rows> Keys(size_t layer, const Rows& x);
  absl::StatusOr<Rows> Values(size_t layer, const Rows& x);
  absl::StatusOr<Rows> Queries(size_t layer, const Rows& x);
  // norm(h; input_layernorm)
  absl::StatusOr<Rows> InputNorm(size_t layer, const Rows& h);
  // Rotates all heads of every row to positions[row].
  Rows Rotate(const Rows& rows, const std::vector<int64_t>& positions, const Rotation& rotation) const;
  // The attention of block rows at positions [start, start + rows): context, then the block itself.
  Rows Attend(const Rows& q, const Rows& k, const Rows& v, int64_t start, const LayerContext& context,
              const DraftLayerMask& mask) const;
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

  // The largest number that came up since the last call of ForgetLargest, squares that a norm sums up
  // included; infinite where one was none. Beyond float32's range the serving path cannot follow.
  double largest() const { return largest_; }
  void ForgetLargest() { largest_ = 0; }

  const DraftConfig& config() const { return config_; }

 private:
  absl::StatusOr<const std::vector<float>*> Weight(const std::string& name);
  absl::StatusOr<Rows> Linear(const Rows& x, const std::string& weight);
  absl::StatusOr<Rows> Norm(const Rows& x, const std::string& weight, double offset = 0);
  // Over heads of head_dim.
  absl::StatusOr<Rows> HeadNorm(Rows x, const std::string& weight);
  absl::StatusOr<Rows> HeadRows(int64_t first, int64_t count);
  void Note(double value) const;
  void Note(const Rows& rows) const;

  const DraftConfig& config_;
  const DraftCheckpoint& drafter_;
  const TargetCheckpoint& target_;
  std::map<std::string, std::vector<float>> weights_;
  mutable double largest_ = 0;
};

}  // namespace dflash::doctor
