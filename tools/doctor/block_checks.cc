// embedding, masks, draft-layers, positions, block-size: the block on its way to the final norm
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
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
absl::Status CheckMasks(const Subject& subject, const SequenceRecord& record) {
  Report& report = *subject.report;
  const std::vector<DraftLayerMask>& layers = subject.contract().layers;
  StageError worst;
  std::vector<std::string> seen, wrong, unexplained;
  bool sliding_wrong = false;
  subject.reference->ForgetLargest();
  for (size_t layer = 0; layer < subject.reference->config().layers.size(); ++layer) {
    const DraftLayerMask& wanted = layers[layer];
    DFLASH_ASSIGN_OR_RETURN(const MaskMatch match,
                            ClosestMask(subject, record, layer, {wanted.causal, wanted.window},
                                        {{!wanted.causal, wanted.window}}));
    const bool causal = match.mask.causal;
    worst.Keep(match.wanted);
    seen.emplace_back(CausalityName(causal));
    if (causal == wanted.causal) {
      if (match.wanted.fails()) {
        unexplained.push_back(absl::StrFormat("layer %d is off by %.2g with the wanted mask (%s)", layer,
                                              match.wanted.error, CausalityName(causal)));
      }
      continue;
    }
    const bool sliding = wanted.kind == DraftLayerKind::kSliding;
    sliding_wrong |= sliding;
    wrong.push_back(
        absl::StrCat("layer ", layer, " (", sliding ? "sliding" : "full", ") is ", CausalityName(causal)));
  }
  const std::string masks = absl::StrCat("layers are ", absl::StrJoin(seen, ", "), " in the block");
  if (subject.bundle == nullptr) {
    report.NotChecked("masks", absl::StrCat("needs a golden bundle; seen: ", masks));
  } else if (!wrong.empty()) {
    // A short block can come near the wrong mask's numbers, so a mask that fits better fails in any case.
    const double gate = std::min(worst.gate, 1.0);  // of another layer, if that tells nothing
    report.Judge("masks", std::max(worst.error, 2 * gate), gate, kLiterals, absl::StrJoin(wrong, "; "),
                 sliding_wrong ? "sliding layers run bidirectional: an absent is_causal means causal for them"
                               : "full layers run causal: they see the whole block in both directions");
  } else {
    JudgeStage(subject, "masks", worst, kLiterals,
               unexplained.empty() ? masks : absl::StrJoin(unexplained, "; "),
               "the attention is none that a mask explains: scale, heads or keys");
  }
  return absl::OkStatus();
}

// --- draft-layers and positions: every layer from its own input

struct LayerErrors {
  StageError layers;  // projections, feed-forward and norms
  std::optional<size_t> first_bad_layer;
  StageError rotated;                 // queries and keys, rotated as wanted
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
    const auto normed = [&] { return reference.InputNorm(layer, reference.Rounded(input)); };
    const auto queries = [&]() -> absl::StatusOr<Rows> {
      DFLASH_ASSIGN_OR_RETURN(const Rows x, normed());
      return reference.Queries(layer, x);
    };
    const auto keys = [&]() -> absl::StatusOr<Rows> {
      DFLASH_ASSIGN_OR_RETURN(const Rows x, normed());
      return reference.Keys(layer, x);
    };
    StageError worst;
    DFLASH_ASSIGN_OR_RETURN(worst, CompareStage(subject, of.v, [&]() -> absl::StatusOr<Rows> {
                              DFLASH_ASSIGN_OR_RETURN(const Rows x, normed());
                              return reference.Values(layer, x);
                            }));
    DFLASH_ASSIGN_OR_RETURN(const StageError residual, CompareStage(subject, pass.residuals[layer + 1], [&] {
                              return reference.LayerOutput(layer, reference.Rounded(input),
                                                           reference.Rounded(of.attended));
                            }));
    worst.Keep(residual);
    double gate_of_keys = 0;
    using Stage = std::function<absl::StatusOr<Rows>()>;
    for (const auto& [ours, stage] : {std::pair<const Rows&, Stage>(of.q, queries), {of.k, keys}}) {
      DFLASH_ASSIGN_OR_RETURN(
          const StageError lengths,
          CompareStage(subject, HeadNorms(ours, head_dim), [&, &stage = stage]() -> absl::StatusOr<Rows> {
            DFLASH_ASSIGN_OR_RETURN(const Rows rows, stage());
            return HeadNorms(rows, head_dim);
          }));
      DFLASH_ASSIGN_OR_RETURN(const StageError rotated,
                              CompareStage(subject, ours, [&, &stage = stage]() -> absl::StatusOr<Rows> {
                                DFLASH_ASSIGN_OR_RETURN(const Rows rows, stage());
                                return reference.Rotate(rows, positions, wanted);
                              }));
      worst.Keep(lengths);
      errors.rotated.Keep(rotated);
      gate_of_keys = rotated.gate;
    }
    DFLASH_ASSIGN_OR_RETURN(const Rows k, keys());
    if (worst.fails() && !errors.first_bad_layer) errors.first_bad_layer = layer;
    errors.layers.Keep(worst);
    Keep(ClosestRotation(subject, k, of.k, positions, wanted, gate_of_keys), wanted, &errors.seen);
  }
  DFLASH_ASSIGN_OR_RETURN(const StageError last, CompareStage(subject, pass.output, [&] {
                            return reference.Output(reference.Rounded(pass.residuals.back()));
                          }));
  errors.layers.Keep(last);
  return errors;
}

void CheckDraftLayers(const Subject& subject, const LayerErrors& errors) {
  JudgeStage(subject, "draft-layers", errors.layers, "double precision, every layer from its own input",
             errors.first_bad_layer
                 ? absl::StrCat("layer ", *errors.first_bad_layer, " is the first that is off")
                 : "projections, feed-forward and norms",
             "norm form, a projection or the feed-forward block of that layer");
}

void CheckPositions(const Subject& subject, const LayerErrors& errors) {
  const Rotation& seen = errors.seen->rotation;
  const std::string at = absl::StrFormat("rows of the block are rotated with theta %g, positions off by %d",
                                         seen.theta, seen.shift);
  if (subject.bundle == nullptr)
    return subject.report->NotChecked("positions", "needs a golden bundle; seen: " + at);
  JudgeStage(subject, "positions", errors.rotated,
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
  DFLASH_RETURN_IF_ERROR(CheckMasks(subject, record));
  subject.reference->ForgetLargest();
  DFLASH_ASSIGN_OR_RETURN(const LayerErrors errors, MeasureLayers(subject, record));
  CheckDraftLayers(subject, errors);
  CheckPositions(subject, errors);
  CheckBlockSize(subject, record.pass);
  return absl::OkStatus();
}

}  // namespace dflash::doctor
