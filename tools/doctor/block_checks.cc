// embedding, masks, draft-layers, positions, block-size: the block on its way to the final norm
#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "tools/doctor/checks.h"
#include "tools/doctor/comparisons.h"

namespace dflash::doctor {
namespace {

constexpr char kLiterals[] = "literals of the golden bundle";

absl::Status CheckEmbedding(const Subject& subject, const SequenceRecord& record) {
  const int32_t mask = subject.contract().mask_token_id;
  std::vector<int32_t> ids(static_cast<size_t>(record.pass.rows()), mask);
  ids[0] = record.anchor;
  DFLASH_ASSIGN_OR_RETURN(const Rows embedded, subject.reference->Embedding(ids));
  const double error = RelativeError(record.pass.residuals[0], embedded);
  if (subject.bundle == nullptr) {
    subject.report->NotChecked(
        "embedding",
        absl::StrFormat("needs a golden bundle; against mask id %d of config.json: %.2g", mask, error));
    return absl::OkStatus();
  }
  subject.report->Judge("embedding", error, subject.gates.stage,
                        "rows of the target's embedding: anchor, then the bundle's mask id",
                        absl::StrCat("mask id ", mask), "another mask id, or rows of another embedding");
  return absl::OkStatus();
}

// Causality alone: no window reaches the context of this record.
void CheckMasks(const Subject& subject, const SequenceRecord& record) {
  Report& report = *subject.report;
  const std::vector<DraftLayerMask>& layers = subject.contract().layers;
  double worst = 0;
  std::vector<std::string> seen, wrong;
  bool sliding_wrong = false, unknown = false;
  for (size_t layer = 0; layer < subject.reference->config().layers.size(); ++layer) {
    const DraftLayerMask& wanted = layers[layer];
    const MaskMatch match =
        ClosestMask(subject, record, layer, {wanted.causal, !wanted.causal}, {wanted.window});
    worst = std::max(worst, ClosestMask(subject, record, layer, {wanted.causal}, {wanted.window}).error);
    seen.emplace_back(CausalityName(match.causal));
    if (match.causal == wanted.causal && match.error <= subject.gates.stage) continue;
    const bool sliding = wanted.kind == DraftLayerKind::kSliding;
    unknown |= match.error > subject.gates.stage;
    sliding_wrong |= sliding;
    wrong.push_back(absl::StrCat("layer ", layer, " (", sliding ? "sliding" : "full", ") is ",
                                 CausalityName(match.causal)));
  }
  const std::string masks = absl::StrCat("layers are ", absl::StrJoin(seen, ", "), " in the block");
  if (subject.bundle == nullptr)
    return report.NotChecked("masks", absl::StrCat("needs a golden bundle; seen: ", masks));
  if (wrong.empty()) return report.Pass("masks", worst, subject.gates.stage, kLiterals, masks);
  // A short block can come near the wrong mask's numbers, so a mask that fits better fails in any case.
  report.Judge("masks", std::max(worst, 2 * subject.gates.stage), subject.gates.stage, kLiterals,
               absl::StrJoin(wrong, "; "),
               unknown         ? "the attention is none that a mask explains: scale, heads or keys"
               : sliding_wrong ? "sliding layers run bidirectional: an absent is_causal means causal for them"
                               : "full layers run causal: they see the whole block in both directions");
}

// --- draft-layers and positions: every layer from its own input

struct LayerErrors {
  double layers = 0;  // projections, feed-forward and norms
  std::optional<size_t> first_bad_layer;
  double rotated = 0;                 // queries and keys, rotated as wanted
  std::optional<RotationMatch> seen;  // of keys
};

absl::StatusOr<LayerErrors> MeasureLayers(const Subject& subject, const SequenceRecord& record) {
  DraftReference& reference = *subject.reference;
  const DraftPass& pass = record.pass;
  const int64_t head_dim = reference.config().head_dim;
  std::vector<int64_t> positions(static_cast<size_t>(pass.rows()));
  for (size_t j = 0; j < positions.size(); ++j) positions[j] = record.length() + static_cast<int64_t>(j);
  const Rotation wanted = WantedRotation(subject);
  LayerErrors errors;
  for (size_t layer = 0; layer < reference.config().layers.size(); ++layer) {
    const DraftPass::Layer& of = pass.layers[layer];
    const Rows& input = pass.residuals[layer];
    DFLASH_ASSIGN_OR_RETURN(const Rows x, reference.InputNorm(layer, input));
    DFLASH_ASSIGN_OR_RETURN(const Rows q, reference.Queries(layer, x));
    DFLASH_ASSIGN_OR_RETURN(const Rows k, reference.Keys(layer, x));
    DFLASH_ASSIGN_OR_RETURN(const Rows v, reference.Values(layer, x));
    DFLASH_ASSIGN_OR_RETURN(const Rows out, reference.LayerOutput(layer, input, of.attended));
    const double error = std::max({RelativeError(of.v, v), RelativeError(pass.residuals[layer + 1], out),
                                   RelativeError(HeadNorms(of.q, head_dim), HeadNorms(q, head_dim)),
                                   RelativeError(HeadNorms(of.k, head_dim), HeadNorms(k, head_dim))});
    if (error > subject.gates.stage && !errors.first_bad_layer) errors.first_bad_layer = layer;
    errors.layers = std::max(errors.layers, error);
    Keep(ClosestRotation(subject, k, of.k, positions, wanted), wanted, &errors.seen);
    errors.rotated = std::max({errors.rotated, RelativeError(of.q, reference.Rotate(q, positions, wanted)),
                               RelativeError(of.k, reference.Rotate(k, positions, wanted))});
  }
  DFLASH_ASSIGN_OR_RETURN(const Rows output, reference.Output(pass.residuals.back()));
  errors.layers = std::max(errors.layers, RelativeError(pass.output, output));
  return errors;
}

void CheckDraftLayers(const Subject& subject, const LayerErrors& errors) {
  subject.report->Judge(
      "draft-layers", errors.layers, subject.gates.stage, "double precision, every layer from its own input",
      errors.first_bad_layer ? absl::StrCat("layer ", *errors.first_bad_layer, " is the first that is off")
                             : "projections, feed-forward and norms",
      "norm form, a projection or the feed-forward block of that layer");
}

void CheckPositions(const Subject& subject, const LayerErrors& errors) {
  const Rotation& seen = errors.seen->rotation;
  const std::string at = absl::StrFormat("rows of the block are rotated with theta %g, positions off by %d",
                                         seen.theta, seen.shift);
  if (subject.bundle == nullptr)
    return subject.report->NotChecked("positions", "needs a golden bundle; seen: " + at);
  subject.report->Judge(
      "positions", errors.rotated, subject.gates.stage,
      "the bundle's theta at positions s + j, in double precision", at,
      seen.shift != 0 ? "block rows carry shifted positions" : "as for RoPE of the context");
}

void CheckBlockSize(const Subject& subject, const DraftPass& pass) {
  const std::string seen = absl::StrCat(pass.rows(), " rows, ", pass.proposals.size(), " drafts");
  if (subject.bundle == nullptr)
    return subject.report->NotChecked("block-size", "needs a golden bundle; seen: " + seen);
  const int64_t wanted = subject.contract().block_size;
  subject.report->Judge("block-size", std::abs(static_cast<double>(pass.rows() - wanted)), 0, kLiterals,
                        absl::StrCat(seen, "; wanted ", wanted, " rows"),
                        "block_size is counted without the anchor, or drafts with it");
}

}  // namespace

absl::Status CheckBlock(const Subject& subject, const SequenceRecord& record) {
  DFLASH_RETURN_IF_ERROR(CheckEmbedding(subject, record));
  CheckMasks(subject, record);
  DFLASH_ASSIGN_OR_RETURN(const LayerErrors errors, MeasureLayers(subject, record));
  CheckDraftLayers(subject, errors);
  CheckPositions(subject, errors);
  CheckBlockSize(subject, record.pass);
  return absl::OkStatus();
}

}  // namespace dflash::doctor
