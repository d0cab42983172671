#include "tools/doctor/checks.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "kernels/batch/segments.h"

namespace dflash::doctor {
namespace {

constexpr int64_t kSampledRows = 40;
constexpr double kNone = std::numeric_limits<double>::infinity();

// At most kSampledRows of [0, rows): both ends and some between.
std::vector<int64_t> Sampled(int64_t rows) {
  std::vector<int64_t> chosen;
  for (int64_t i = 0; i < std::min(rows, kSampledRows); ++i)
    chosen.push_back(rows <= kSampledRows ? i : i * (rows - 1) / (kSampledRows - 1));
  return chosen;
}

Rows Pick(const Rows& rows, const std::vector<int64_t>& chosen) {
  Rows picked(0, rows.cols);
  for (const int64_t i : chosen) picked.Append(rows.Slice(i, 1));
  return picked;
}

// Of every head of every row: rotation leaves it alone.
Rows HeadNorms(const Rows& rows, int64_t head_dim) {
  Rows norms(rows.rows, rows.cols / head_dim);
  for (int64_t i = 0; i < rows.rows; ++i) {
    for (int64_t column = 0; column < rows.cols; ++column) {
      double& norm = norms.row(i)[column / head_dim];
      norm += rows.row(i)[column] * rows.row(i)[column];
    }
  }
  for (double& norm : norms.values) norm = std::sqrt(norm);
  return norms;
}

int64_t RowsThatDiffer(const Rows& a, const Rows& b, int64_t count) {
  int64_t different = 0;
  for (int64_t i = 0; i < count; ++i) different += !std::equal(a.row(i), a.row(i) + a.cols, b.row(i));
  return different;
}

std::string StateName(int64_t index, size_t states) {
  if (index == 0) return "the embedding";
  if (index + 1 == static_cast<int64_t>(states)) return "the final norm";
  return absl::StrCat("the output of layer ", index - 1);
}

std::string Describe(bool causal, int64_t window) {
  return absl::StrCat(causal ? "causal" : "bidirectional", ", ",
                      window == 0 ? std::string("no window") : absl::StrCat("window ", window));
}

}  // namespace

Gates GatesFor(DType activations) {
  return activations == DType::kF32 ? Gates{.golden = 5e-5, .stage = 2e-5, .margin = 1e-4, .acceptance = 0.05}
                                    : Gates{.golden = 0.2, .stage = 0.06, .margin = 0.25, .acceptance = 0.1};
}

std::string Checks::Against(const Sequences& sequences) const {
  std::vector<size_t> prompts;
  for (const std::optional<size_t>& prompt : sequences.golden) {
    if (prompt) prompts.push_back(*prompt);
  }
  return absl::StrCat("golden bundle, prompts ", absl::StrJoin(prompts, ", "));
}

absl::Status Checks::CheckTarget(const Sequences& sequences) const {
  if (bundle == nullptr) {
    report->NotChecked("target", "needs a golden bundle");
    return absl::OkStatus();
  }
  if (!target_recorded) {
    report->Skip("target", "the bundle was recorded with other weights of the target");
    return absl::OkStatus();
  }
  double worst = 0;
  std::string where = "every hidden state and the logits of the last position agree";
  bool any = false;
  for (size_t i = 0; i < sequences.records.size(); ++i) {
    const SequenceRecord& record = sequences.records[i];
    if (!sequences.golden[i]) continue;
    if (bundle->HasTensor(*sequences.golden[i], "hidden_states")) {
      DFLASH_ASSIGN_OR_RETURN(const Rows golden, bundle->Tensor(*sequences.golden[i], "hidden_states"));
      const auto states = static_cast<int64_t>(record.hidden_states.size());
      if (golden.rows % std::max<int64_t>(states, 1) != 0)
        return absl::InvalidArgumentError(absl::StrCat("hidden_states of prompt ", *sequences.golden[i],
                                                       ": not ", states,
                                                       " states, the embedding and one per layer"));
      const int64_t rows = golden.rows / states;
      for (int64_t state = 0; state < states; ++state) {
        const Rows& ours = record.hidden_states[static_cast<size_t>(state)];
        const double error =
            RelativeError(ours.Slice(0, std::min(rows, ours.rows)), golden.Slice(state * rows, rows));
        any = true;
        if (!(error > worst)) continue;
        worst = error;
        if (error > gates.golden)
          where = absl::StrCat("prompt ", *sequences.golden[i], ": ",
                               StateName(state, record.hidden_states.size()), " is off first by that much");
        if (error > gates.golden) break;
      }
    }
    if (bundle->HasTensor(*sequences.golden[i], "last_logits")) {
      DFLASH_ASSIGN_OR_RETURN(const Rows golden, bundle->Tensor(*sequences.golden[i], "last_logits"));
      const int64_t columns = std::min(golden.cols, record.last_logits.cols);
      worst =
          std::max(worst, RelativeError(record.last_logits.Columns(0, columns), golden.Columns(0, columns)));
      any = true;
    }
  }
  if (!any) {
    report->NotChecked("target", "the bundle holds no hidden states");
    return absl::OkStatus();
  }
  if (!report->Judge("target", worst, gates.golden, Against(sequences), where,
                     "the target's own layers, its weights or its precision")) {
    report->Of("target").blame = Blame::kUnsettled;
  }
  return absl::OkStatus();
}

absl::Status Checks::CheckTaps(const Sequences& sequences) const {
  const SequenceRecord& first = sequences.records[0];
  const int64_t width = target_config->hidden_size;
  const int64_t taps = first.taps.cols / width;

  // Tap point: every tap is one of our own finished residuals, bit for bit.
  double worst = 0;
  for (int64_t tap = 0; tap < taps; ++tap) {
    double least = kNone;
    for (const Rows& state : first.hidden_states) {
      least = std::min(least, RelativeError(first.taps.Block(0, state.rows, tap * width, width), state));
    }
    worst = std::max(worst, least);
  }
  report->Judge(
      "tap-point", worst, 0, "finished residuals of the target's own layers",
      "distance of a tap to the nearest residual",
      "a tap is taken before the residual is complete (sum over ranks, residual add) or behind a norm");

  // Alignment: what follows a token cannot change what was before it.
  const Rows& changed = sequences.perturbed.taps;
  const int64_t at = sequences.perturbed_at;
  const int64_t before = RowsThatDiffer(first.taps, changed, at);
  const bool own = RowsThatDiffer(first.taps.Slice(at, 1), changed.Slice(at, 1), 1) == 1;
  if (report->Judge("tap-alignment", static_cast<double>(before) + (own ? 0 : 1), 0,
                    absl::StrCat("the same prompt with another token at position ", at),
                    own ? absl::StrCat(before, " of ", at, " rows before the changed token changed")
                        : std::string("the changed token's own taps did not change"),
                    before > 0 ? "a row carries the taps of a later token"
                               : "a row carries the taps of an earlier token")) {
    report->Pass("next-token", 0, 0, absl::StrCat("the same prompt with another token at position ", at),
                 "context features before a token do not change with it");
  }
  const int64_t features = RowsThatDiffer(first.features, sequences.perturbed.features, at);
  report->Judge("next-token", static_cast<double>(features), 0,
                absl::StrCat("the same prompt with another token at position ", at),
                absl::StrCat(features, " of ", at, " context features before the changed token changed"),
                "the drafter's context reads the token after its own");

  // Which layers the taps are, by the bundle's hidden states.
  if (bundle == nullptr || !target_recorded) {
    const std::string why = bundle == nullptr
                                ? "needs a golden bundle: our own path reads the same ids with the same code"
                                : "the bundle was recorded with other weights of the target";
    for (const char* id : {"tap-layer", "tap-order"}) {
      if (bundle == nullptr) {
        report->NotChecked(id, why);
      } else {
        report->Skip(id, why);
      }
    }
    return absl::OkStatus();
  }
  std::vector<std::map<int64_t, double>> errors(static_cast<size_t>(taps));  // by tap and state: the worst
  size_t states = 0;
  double last_rows = 0;
  bool any_last = false;
  for (size_t i = 0; i < sequences.records.size(); ++i) {
    const SequenceRecord& record = sequences.records[i];
    if (!sequences.golden[i]) continue;
    if (bundle->HasTensor(*sequences.golden[i], "hidden_states")) {
      states = record.hidden_states.size();
      DFLASH_ASSIGN_OR_RETURN(const Rows golden, bundle->Tensor(*sequences.golden[i], "hidden_states"));
      const int64_t rows = golden.rows / static_cast<int64_t>(states);
      for (int64_t tap = 0; tap < taps; ++tap) {
        const Rows ours = record.taps.Block(0, rows, tap * width, width);
        for (int64_t state = 0; state < static_cast<int64_t>(states); ++state) {
          double& error = errors[static_cast<size_t>(tap)][state];
          error = std::max(error, RelativeError(ours, golden.Slice(state * rows, rows)));
        }
      }
    }
    if (bundle->HasTensor(*sequences.golden[i], "taps_last16")) {
      DFLASH_ASSIGN_OR_RETURN(const Rows golden, bundle->Tensor(*sequences.golden[i], "taps_last16"));
      any_last = true;
      last_rows = std::max(
          last_rows, RelativeError(record.taps.Slice(record.length() - golden.rows, golden.rows), golden));
    }
  }
  if (states == 0) {
    report->NotChecked("tap-layer", "the bundle holds no hidden states");
    report->NotChecked("tap-order", "the bundle holds no hidden states");
    return absl::OkStatus();
  }
  std::vector<int64_t> found, wanted;
  for (const std::map<int64_t, double>& of_tap : errors) {
    found.push_back(std::min_element(of_tap.begin(), of_tap.end(), [](const auto& a, const auto& b) {
                      return a.second < b.second;
                    })->first);
  }
  for (const int32_t tap : expected()->taps) wanted.push_back(Number(OutputOf(LayerIndex{tap})));
  // The distance of the worst tap to what it should be, whatever the order.
  double index_error = found.size() == wanted.size() ? 0 : kNone;
  for (const int64_t state : wanted) {
    double least = kNone;
    for (const std::map<int64_t, double>& of_tap : errors) {
      const auto error = of_tap.find(state);
      if (error != of_tap.end()) least = std::min(least, error->second);
    }
    index_error = std::max(index_error, least);
  }
  const auto layers = [](const std::vector<int64_t>& list) {
    return absl::StrJoin(list, ", ",
                         [](std::string* out, int64_t state) { absl::StrAppend(out, state - 1); });
  };
  std::string cause = "target_layer_ids of another drafter";
  bool all_lower = found.size() == wanted.size(), all_higher = all_lower;
  for (size_t i = 0; i < found.size() && i < wanted.size(); ++i) {
    all_lower &= found[i] == wanted[i] - 1;
    all_higher &= found[i] == wanted[i] + 1;
  }
  if (all_lower) {
    cause =
        "layer ids are read one too low: id k was taken for hidden state k, which is the output of layer k - "
        "1 "
        "(hidden state 0 is the embedding)";
  } else if (all_higher) {
    cause = "layer ids are read one too high: the offset of hidden states was added twice";
  }
  report->Judge("tap-layer", index_error, gates.golden, Against(sequences),
                absl::StrCat("the taps are the outputs of layers ", layers(found),
                             "; the drafter was trained on ", layers(wanted)),
                cause);

  std::vector<int64_t> sorted = found, sorted_wanted = wanted;
  std::sort(sorted.begin(), sorted.end());
  std::sort(sorted_wanted.begin(), sorted_wanted.end());
  std::vector<int64_t> places, wanted_places;
  for (const int64_t state : found)
    places.push_back(std::lower_bound(sorted.begin(), sorted.end(), state) - sorted.begin());
  for (const int64_t state : wanted) {
    wanted_places.push_back(std::lower_bound(sorted_wanted.begin(), sorted_wanted.end(), state) -
                            sorted_wanted.begin());
  }
  const std::string order =
      absl::StrCat("order of the taps: outputs of layers ", layers(found), "; wanted ", layers(wanted));
  if (places != wanted_places) {
    report->Judge(
        "tap-order", any_last ? last_rows : kNone, gates.golden, Against(sequences), order,
        "the taps are concatenated in another order than target_layer_ids, or gathered rank by rank");
  } else if (sorted != sorted_wanted) {
    report->Skip("tap-order", "the layers are wrong already");
  } else {
    report->Judge("tap-order", any_last ? last_rows : 0, gates.golden, Against(sequences),
                  "taps of the last 16 positions", "taps of later positions belong to other tokens");
  }
  return absl::OkStatus();
}

Checks::RotationMatch Checks::ClosestRotation(const Rows& unrotated, const Rows& rotated,
                                              const std::vector<int64_t>& positions,
                                              const Rotation& first) const {
  RotationMatch best = {first, RelativeError(reference->Rotate(unrotated, positions, first), rotated)};
  if (best.error <= gates.stage) return best;
  const double fraction =
      static_cast<double>(target_config->rotary_dim) / static_cast<double>(target_config->head_dim);
  std::vector<Rotation> others;
  for (const double theta : {first.theta, target_config->rope_theta, 1e4, 1e5, 5e5, 1e6, 5e6, 1e7}) {
    for (const double part : {first.fraction, fraction, 0.5, 0.25, 1.0}) {
      for (const int64_t shift : {0, -1, 1}) others.push_back({theta, part, shift, false});
    }
    others.push_back({theta, first.fraction, 0, true});
  }
  for (const Rotation& other : others) {
    const double error = RelativeError(reference->Rotate(unrotated, positions, other), rotated);
    if (error < best.error * 0.5) best = {other, error};
  }
  return best;
}

absl::Status Checks::CheckContext(const Sequences& sequences) const {
  const DraftConfig& config = reference->config();
  double fusion = 0, values = 0, norms = 0, origin = 0, rope = 0, golden_fusion = 0;
  bool any_golden = false;
  size_t bad_layer = 0;
  std::string fusion_cause,
      fusion_detail = "c of sampled positions, from the taps that the drafter was given", rope_cause;
  std::optional<RotationMatch> seen;
  const ExpectedContract& contract = bundle == nullptr ? own : *expected();
  const Rotation wanted = {.theta = contract.rope_theta, .fraction = contract.rotary_fraction};
  for (size_t i = 0; i < sequences.records.size(); ++i) {
    const SequenceRecord& record = sequences.records[i];
    const std::vector<int64_t> positions = Sampled(record.length());
    const Rows taps = Pick(record.taps, positions), c = Pick(record.features, positions);
    DFLASH_ASSIGN_OR_RETURN(const Rows right, reference->Features(taps));
    const double error = RelativeError(c, right);
    if (error > gates.stage && fusion_cause.empty()) {
      fusion_cause = "fc or hidden_norm";
      const std::pair<FusionForm, const char*> forms[] = {
          {FusionForm::kOnePlus,
           "the target's form of the norm, (1 + w) x / rms, is used in the drafter, whose norm is w x / rms"},
          {FusionForm::kUnnormed, "hidden_norm is left out"}};
      for (const auto& [form, words] : forms) {
        DFLASH_ASSIGN_OR_RETURN(const Rows other, reference->Features(taps, form));
        if (RelativeError(c, other) <= gates.stage) fusion_cause = words;
      }
    }
    fusion = std::max(fusion, error);
    if (sequences.golden[i] && target_recorded && drafter_recorded &&
        bundle->HasTensor(*sequences.golden[i], "context_feature_last16")) {
      DFLASH_ASSIGN_OR_RETURN(const Rows golden,
                              bundle->Tensor(*sequences.golden[i], "context_feature_last16"));
      golden_fusion =
          std::max(golden_fusion,
                   RelativeError(record.features.Slice(record.length() - golden.rows, golden.rows), golden));
      any_golden = true;
    }
    if (record.context_end != record.length() || record.context.size() != config.layers.size()) {
      report->Fail("injection",
                   absl::StrCat("the context ends at ", record.context_end, " behind a prompt of ",
                                record.length(), " tokens"),
                   "rows are not ingested, or not all of them");
      continue;
    }
    for (size_t layer = 0; layer < config.layers.size(); ++layer) {
      DFLASH_ASSIGN_OR_RETURN(const Rows k, reference->Keys(layer, c));
      DFLASH_ASSIGN_OR_RETURN(const Rows v, reference->Values(layer, c));
      const Rows stored_k = Pick(record.context[layer].k, positions),
                 stored_v = Pick(record.context[layer].v, positions);
      const double value_error = RelativeError(stored_v, v);
      if (value_error > std::max(values, gates.stage)) bad_layer = layer;
      values = std::max(values, value_error);
      norms =
          std::max(norms, RelativeError(HeadNorms(stored_k, config.head_dim), HeadNorms(k, config.head_dim)));
      // Position 0 is not rotated, whatever the rotation.
      origin = std::max(origin, RelativeError(stored_k.Slice(0, 1), k.Slice(0, 1)));
      const RotationMatch match = ClosestRotation(k, stored_k, positions, wanted);
      if (!seen || (match.rotation != wanted && seen->rotation == wanted)) seen = match;
      rope = std::max(rope, RelativeError(reference->Rotate(k, positions, wanted), stored_k));
    }
  }
  if (report->Judge("fusion", fusion, gates.stage, "double precision, c = norm(fc taps)", fusion_detail,
                    fusion_cause) &&
      any_golden && report->Of("tap-layer").outcome == Outcome::kPass &&
      report->Of("tap-order").outcome == Outcome::kPass) {
    // What is wrong with the arithmetic is known by now: this is about the weights.
    if (!report->Judge("fusion", golden_fusion, gates.golden, Against(sequences),
                       "c of the last 16 positions",
                       "other weights of fc or hidden_norm than the bundle's")) {
      report->Of("fusion").blame = Blame::kUnsettled;
    }
  }
  if (report->Of("injection").outcome != Outcome::kFail) {
    const double worst = std::max({values, norms, origin});
    report->Judge("injection", worst, gates.stage, "double precision, k_norm(k_proj c) and v_proj c",
                  absl::StrCat(config.layers.size(), " layers: values ", absl::StrFormat("%.2g", values),
                               ", lengths of key heads ", absl::StrFormat("%.2g", norms),
                               ", keys of position 0 ", absl::StrFormat("%.2g", origin)),
                  absl::StrCat("layer ", bad_layer,
                               " does not make its context from c alone (k_norm left out, "
                               "input_layernorm applied, or another layer's weights)"));
  }
  const std::string rotated =
      !seen ? std::string("no context")
            : absl::StrFormat("keys are rotated with theta %g over %.0f%% of a head%s%s",
                              seen->rotation.theta, 100 * seen->rotation.fraction,
                              seen->rotation.shift == 0
                                  ? ""
                                  : absl::StrFormat(", positions off by %d", seen->rotation.shift),
                              seen->rotation.interleaved ? ", in neighbouring pairs" : "");
  if (bundle == nullptr) {
    report->NotChecked("rope", absl::StrCat("needs a golden bundle; seen: ", rotated));
    return absl::OkStatus();
  }
  std::string cause = "the rotation is none that the doctor knows";
  if (seen && seen->error <= gates.stage) {
    const Rotation& rotation = seen->rotation;
    if (rotation.fraction != wanted.fraction) {
      cause = "the target's partial_rotary_factor leaked into the drafter, whose heads rotate as a whole";
    } else if (rotation.theta != wanted.theta) {
      cause = absl::StrFormat("theta is read from the wrong place: %g instead of %g", rotation.theta,
                              wanted.theta);
    } else if (rotation.shift != 0) {
      cause = "context rows carry shifted positions";
    } else if (rotation.interleaved) {
      cause = "interleaved pairs instead of halves";
    }
  }
  report->Judge("rope", rope, gates.stage, "the bundle's theta, in double precision", rotated, cause);
  return absl::OkStatus();
}

Checks::MaskMatch Checks::ClosestMask(const SequenceRecord& record, size_t layer,
                                      const std::vector<bool>& causal,
                                      const std::vector<int64_t>& windows) const {
  const DraftPass::Layer& pass = record.pass.layers[layer];
  const int64_t start = record.context_start;
  const LayerContext& all = record.context[layer];
  const LayerContext visible = {.k = all.k.Slice(start, record.context_end - start),
                                .v = all.v.Slice(start, record.context_end - start),
                                .first_position = start};
  MaskMatch best;
  best.error = kNone;
  for (const bool flag : causal) {
    for (const int64_t window : windows) {
      const double error = RelativeError(reference->Attend(pass.q, pass.k, pass.v, record.length(), visible,
                                                           {.window = window, .causal = flag}),
                                         pass.attended);
      // Masks that hide the same keys give the same numbers: the first one counts.
      if (error < best.error * 0.99) best = {flag, window, error};
    }
  }
  return best;
}

absl::Status Checks::CheckBlock(const Sequences& sequences) const {
  const DraftConfig& config = reference->config();
  const SequenceRecord& record = sequences.records[0];
  const DraftPass& pass = record.pass;
  const ExpectedContract& contract = bundle == nullptr ? own : *expected();
  const std::string literal = "literals of the golden bundle";
  const auto block = static_cast<int64_t>(pass.proposals.size()) + 1;

  // Embedding.
  std::vector<int32_t> ids(static_cast<size_t>(block), contract.mask_token_id);
  ids[0] = record.anchor;
  DFLASH_ASSIGN_OR_RETURN(const Rows embedded, reference->Embedding(ids));
  const double embedding = RelativeError(pass.residuals[0], embedded);
  if (bundle == nullptr) {
    report->NotChecked("embedding",
                       absl::StrFormat("needs a golden bundle; against mask id %d of config.json: %.2g",
                                       contract.mask_token_id, embedding));
  } else {
    report->Judge("embedding", embedding, gates.stage,
                  "rows of the target's embedding: anchor, then the bundle's mask id",
                  absl::StrCat("mask id ", contract.mask_token_id),
                  "another mask id, or rows of another embedding");
  }

  // Causality, where no window reaches.
  double worst = 0;
  std::vector<std::string> wrong, seen;
  bool sliding_wrong = false, full_wrong = false, unknown = false;
  for (size_t layer = 0; layer < config.layers.size(); ++layer) {
    const DraftLayerMask& wanted = contract.layers[layer];
    const MaskMatch match = ClosestMask(record, layer, {wanted.causal, !wanted.causal}, {wanted.window});
    seen.push_back(match.causal ? "causal" : "bidirectional");
    const double as_wanted = ClosestMask(record, layer, {wanted.causal}, {wanted.window}).error;
    worst = std::max(worst, as_wanted);
    if (match.causal == wanted.causal && match.error <= gates.stage) continue;
    unknown |= match.error > gates.stage;
    (wanted.kind == DraftLayerKind::kSliding ? sliding_wrong : full_wrong) = true;
    wrong.push_back(absl::StrCat("layer ", layer, " (",
                                 wanted.kind == DraftLayerKind::kSliding ? "sliding" : "full", ") is ",
                                 match.causal ? "causal" : "bidirectional"));
  }
  const std::string masks = absl::StrCat("layers are ", absl::StrJoin(seen, ", "), " in the block");
  if (bundle == nullptr) {
    report->NotChecked("masks", absl::StrCat("needs a golden bundle; seen: ", masks));
  } else if (wrong.empty()) {
    report->Pass("masks", worst, gates.stage, literal, masks);
  } else {
    report->Judge("masks", std::max(worst, 2 * gates.stage), gates.stage, literal, absl::StrJoin(wrong, "; "),
                  unknown ? "the attention is none that a mask explains: scale, heads or keys"
                  : sliding_wrong
                      ? "sliding layers run bidirectional: an absent is_causal means causal for them"
                      : "full layers run causal: they see the whole block in both directions");
  }

  // Layers, and positions of the block's rows.
  std::vector<int64_t> positions(static_cast<size_t>(block));
  for (int64_t j = 0; j < block; ++j) positions[static_cast<size_t>(j)] = record.length() + j;
  const Rotation wanted = {.theta = contract.rope_theta, .fraction = contract.rotary_fraction};
  double layers = 0, rotated = 0;
  std::string broken = "projections, feed-forward and norms";
  std::optional<RotationMatch> rotation;
  for (size_t layer = 0; layer < config.layers.size(); ++layer) {
    const DraftPass::Layer& of = pass.layers[layer];
    DFLASH_ASSIGN_OR_RETURN(const Rows x, reference->InputNorm(layer, pass.residuals[layer]));
    DFLASH_ASSIGN_OR_RETURN(const Rows q, reference->Queries(layer, x));
    DFLASH_ASSIGN_OR_RETURN(const Rows k, reference->Keys(layer, x));
    DFLASH_ASSIGN_OR_RETURN(const Rows v, reference->Values(layer, x));
    DFLASH_ASSIGN_OR_RETURN(const Rows out,
                            reference->LayerOutput(layer, pass.residuals[layer], of.attended));
    const double error =
        std::max({RelativeError(of.v, v), RelativeError(pass.residuals[layer + 1], out),
                  RelativeError(HeadNorms(of.q, config.head_dim), HeadNorms(q, config.head_dim)),
                  RelativeError(HeadNorms(of.k, config.head_dim), HeadNorms(k, config.head_dim))});
    if (error > gates.stage && layers <= gates.stage)
      broken = absl::StrCat("layer ", layer, " is the first that is off");
    layers = std::max(layers, error);
    const RotationMatch match = ClosestRotation(k, of.k, positions, wanted);
    if (!rotation || (match.rotation != wanted && rotation->rotation == wanted)) rotation = match;
    rotated = std::max({rotated, RelativeError(of.q, reference->Rotate(q, positions, wanted)),
                        RelativeError(of.k, reference->Rotate(k, positions, wanted))});
  }
  DFLASH_ASSIGN_OR_RETURN(const Rows output, reference->Output(pass.residuals.back()));
  layers = std::max(layers, RelativeError(pass.output, output));
  report->Judge("draft-layers", layers, gates.stage, "double precision, every layer from its own input",
                broken, "norm form, a projection or the feed-forward block of that layer");
  const std::string at = absl::StrFormat("rows of the block are rotated with theta %g, positions off by %d",
                                         rotation->rotation.theta, rotation->rotation.shift);
  if (bundle == nullptr) {
    report->NotChecked("positions", "needs a golden bundle; seen: " + at);
  } else {
    report->Judge(
        "positions", rotated, gates.stage, "the bundle's theta at positions s + j, in double precision", at,
        rotation->rotation.shift != 0 ? "block rows carry shifted positions" : "as for RoPE of the context");
  }

  // The head, on what the final norm gave. Columns of this rank's part.
  constexpr int64_t kColumns = 64;
  double head = 0, shifted = 0;
  const Rows rows = pass.output.Slice(1, block - 1);
  const int64_t columns = std::min(pass.logits.cols, vocabulary);
  for (int64_t part = 0; part < 4; ++part) {
    const int64_t first = std::max<int64_t>(0, (columns - kColumns) * part / 3);
    const int64_t count = std::min(kColumns, columns - first);
    DFLASH_ASSIGN_OR_RETURN(const Rows right, reference->Logits(rows, first, count));
    DFLASH_ASSIGN_OR_RETURN(const Rows row_before,
                            reference->Logits(pass.output.Slice(0, block - 1), first, count));
    head = std::max(head, RelativeError(pass.logits.Columns(first, count), right));
    shifted = std::max(shifted, RelativeError(pass.logits.Columns(first, count), row_before));
  }
  // The best token of every row by the whole head.
  Rows best(block - 1, 1), margins(block - 1, 1), ids_of_best(block - 1, 1);
  std::fill(best.values.begin(), best.values.end(), -kNone);
  for (int64_t first = 0; first < vocabulary; first += 4096) {
    DFLASH_ASSIGN_OR_RETURN(const Rows part,
                            reference->Logits(rows, first, std::min<int64_t>(4096, vocabulary - first)));
    for (int64_t j = 0; j < part.rows; ++j) {
      for (int64_t id = 0; id < part.cols; ++id) {
        const double logit = part.row(j)[id];
        double& top = best.values[static_cast<size_t>(j)];
        double& margin = margins.values[static_cast<size_t>(j)];
        if (logit > top) {
          margin = logit - top;
          top = logit;
          ids_of_best.values[static_cast<size_t>(j)] = static_cast<double>(first + id);
        } else {
          margin = std::min(margin, top - logit);
        }
      }
    }
  }
  int64_t misses = 0, clear_misses = 0, clear_rows = 0, from_row_before = 0, from_row_behind = 0;
  for (int64_t j = 0; j < block - 1; ++j) {
    const auto token = static_cast<double>(pass.proposals[static_cast<size_t>(j)]);
    const auto id = [&](int64_t row) { return ids_of_best.values[static_cast<size_t>(row)]; };
    const bool clear = margins.values[static_cast<size_t>(j)] > gates.margin;
    misses += token != id(j);
    clear_rows += clear;
    clear_misses += clear && token != id(j);
    from_row_before += j > 0 && token == id(j - 1);
    from_row_behind += j + 2 < block && token == id(j + 1);
  }
  const bool all_alike = std::set<int32_t>(pass.proposals.begin(), pass.proposals.end()).size() == 1;
  if (all_alike && clear_misses > 0) {
    report->Fail(
        "head",
        absl::StrCat("every draft is token ", pass.proposals[0], "; by the head of the target ", clear_misses,
                     " of ", clear_rows, " rows have another best token"),
        "the drafter's head is zero or not the target's: all logits are equal and the lowest id wins");
    report->Of("head").compared = "the target's lm_head, in double precision";
  } else {
    report->Judge("head", head, gates.stage, "the target's lm_head, in double precision",
                  "logits of sampled columns",
                  shifted <= gates.stage
                      ? "row j - 1 goes through the head for position s + j"
                      : "another matrix than the target's lm_head, or the target's final norm before it");
  }
  report->Judge(
      "draft-rows", static_cast<double>(clear_misses), 0, "best token of row j, in double precision",
      absl::StrCat(block - 1 - misses, " of ", block - 1, " drafts are the best token of their own row"),
      all_alike                           ? "see the head"
      : from_row_before > from_row_behind ? "drafts are shifted: row j - 1 is taken for position s + j"
                                          : "drafts are shifted: row j + 1 is taken for position s + j");
  report->Judge("dtype",
                clear_rows == 0 ? 0 : static_cast<double>(clear_misses) / static_cast<double>(clear_rows),
                0.02, "double precision",
                absl::StrCat(misses, " of ", block - 1, " drafts differ, ", clear_misses,
                             " of them in rows that are no near ties"),
                "quantized weights or rounding");
  if (bundle == nullptr) {
    report->NotChecked("block-size",
                       absl::StrCat("needs a golden bundle; seen: ", block, " rows, ", block - 1, " drafts"));
  } else {
    report->Judge("block-size", std::abs(static_cast<double>(block - contract.block_size)), 0, literal,
                  absl::StrCat(block, " rows, ", block - 1, " drafts; wanted ", contract.block_size, " rows"),
                  "block_size is counted without the anchor, or drafts with it");
  }
  return absl::OkStatus();
}

absl::Status Checks::CheckDraftLogits(const Sequences& sequences) const {
  if (bundle == nullptr) {
    report->NotChecked("draft-logits", "needs a golden bundle");
    return absl::OkStatus();
  }
  if (!target_recorded || !drafter_recorded) {
    report->Skip("draft-logits", "the bundle was recorded with other weights");
    return absl::OkStatus();
  }
  double worst = 0;
  bool any = false;
  for (size_t i = 0; i < sequences.records.size(); ++i) {
    if (!sequences.golden[i] || !bundle->HasTensor(*sequences.golden[i], "draft_logits")) continue;
    DFLASH_ASSIGN_OR_RETURN(const Rows golden, bundle->Tensor(*sequences.golden[i], "draft_logits"));
    const Rows& ours = sequences.records[i].pass.logits;
    const int64_t columns = std::min(golden.cols, ours.cols);
    worst = std::max(worst, RelativeError(ours.Columns(0, columns), golden.Columns(0, columns)));
    any = true;
  }
  if (!any) {
    report->NotChecked("draft-logits", "the bundle holds no draft logits");
    return absl::OkStatus();
  }
  if (!report->Judge("draft-logits", worst, gates.golden, Against(sequences),
                     "rows 1 .. B - 1 of the first block", "other weights than the bundle's")) {
    report->Of("draft-logits").blame = Blame::kUnsettled;
  }
  return absl::OkStatus();
}

absl::Status Checks::CheckLongContext(const SequenceRecord& whole, const SequenceRecord& chunked,
                                      const SequenceRecord& brief) const {
  const DraftConfig& config = reference->config();
  const ExpectedContract& contract = bundle == nullptr ? own : *expected();

  // The window's edge, with the causality that the brief context showed.
  std::set<int64_t> sizes = {0};
  for (const DraftLayerMask& mask : contract.layers) {
    if (mask.window == 0) continue;
    for (const int64_t size :
         {mask.window, mask.window - 1, mask.window + 1, 2 * mask.window, mask.window / 2}) {
      if (size > 0) sizes.insert(size);
    }
  }
  double worst = 0;
  std::vector<std::string> seen, wrong;
  bool dropped = false, by_one = false;
  for (size_t layer = 0; layer < config.layers.size(); ++layer) {
    const DraftLayerMask& wanted = contract.layers[layer];
    const bool causal = ClosestMask(brief, layer, {wanted.causal, !wanted.causal}, {wanted.window}).causal;
    std::vector<int64_t> windows = {wanted.window};
    for (const int64_t size : sizes) {
      if (size != wanted.window) windows.push_back(size);
    }
    const MaskMatch match = ClosestMask(whole, layer, {causal}, windows);
    worst = std::max(worst, ClosestMask(whole, layer, {causal}, {wanted.window}).error);
    seen.push_back(Describe(match.causal, match.window));
    if (match.window == wanted.window && match.error <= gates.stage) continue;
    dropped |= match.window == 0;
    by_one |= std::abs(match.window - wanted.window) == 1;
    wrong.push_back(absl::StrCat(
        "layer ", layer, " has ",
        match.window == 0 ? std::string("no window") : absl::StrCat("a window of ", match.window),
        ", wanted ", wanted.window == 0 ? std::string("none") : absl::StrCat(wanted.window)));
  }
  const std::string layers = absl::StrJoin(seen, "; ");
  int64_t longest = 0;
  for (const DraftLayerMask& mask : contract.layers) longest = std::max(longest, mask.window);
  if (bundle == nullptr) {
    report->NotChecked("window", absl::StrCat("needs a golden bundle; seen: ", layers));
  } else if (wrong.empty() && longest >= whole.length()) {
    report->NotChecked(
        "window", absl::StrCat("a context of ", whole.length(), " does not reach the window of ", longest,
                               ": --max-context-tokens ", longest + 96, " would"));
  } else if (wrong.empty()) {
    report->Pass("window", worst, gates.stage,
                 absl::StrCat("literals of the bundle, context of ", whole.length()), layers);
  } else {
    report->Judge("window", std::max(worst, 2 * gates.stage), gates.stage,
                  absl::StrCat("literals of the bundle, context of ", whole.length()),
                  absl::StrJoin(wrong, "; "),
                  dropped  ? "the sliding windows are dropped: sliding layers see the whole context"
                  : by_one ? "the window is off by one: it counts the query itself (q - k < W)"
                           : "another sliding_window");
  }

  // Pages.
  double values = 0;
  const std::vector<int64_t> positions = Sampled(whole.length());
  for (size_t layer = 0; layer < config.layers.size(); ++layer) {
    DFLASH_ASSIGN_OR_RETURN(const Rows v, reference->Values(layer, Pick(whole.features, positions)));
    values = std::max(values, RelativeError(Pick(whole.context[layer].v, positions), v));
  }
  report->Judge("paging", values, gates.stage, "double precision, v_proj c of sampled positions",
                absl::StrCat("a context of ", whole.length(), " positions in ",
                             (whole.length() + kPageTokens - 1) / kPageTokens, " pages"),
                "pages of the drafter's context are freed or written again while they are read");

  // Chunks.
  int64_t differing = 0;
  for (size_t layer = 0; layer < config.layers.size(); ++layer) {
    differing += !(whole.context[layer].k == chunked.context[layer].k) ||
                 !(whole.context[layer].v == chunked.context[layer].v);
  }
  const std::string compared = absl::StrCat("the same prompt of ", whole.length(), " tokens in one piece");
  if (chunked.context_start != whole.context_start) {
    report->Fail(
        "chunked-prefill",
        absl::StrFormat("in pieces of 64 the context covers positions %d to %d only, in one piece %d to %d",
                        chunked.context_start, chunked.context_end, whole.context_start, whole.context_end),
        "only the last prefill chunk's taps reach the drafter");
    report->Of("chunked-prefill").compared = compared;
  } else {
    const double logits = RelativeError(chunked.pass.logits, whole.pass.logits);
    report->Judge("chunked-prefill",
                  differing > 0 ? std::max(logits, static_cast<double>(differing)) : logits, 0, compared,
                  absl::StrCat(differing, " layers with another context; draft logits off by ",
                               absl::StrFormat("%.2g", logits)),
                  "pieces of a prompt change what is computed");
  }

  // Coverage.
  report->Judge(
      "prefix", 1 - whole.coverage(), 0, "coverage 1: context of every position of the prompt",
      absl::StrFormat("the drafter's context covers positions %d to %d of a prompt of %d (%.0f%%)",
                      whole.context_start, whole.context_end, whole.length(), 100 * whole.coverage()),
      "the prefix is restored without drafter context: the target goes on where the drafter knows nothing");
  return absl::OkStatus();
}

absl::Status Checks::CheckTogether(const Probe::Together& together,
                                   const std::vector<const SequenceRecord*>& alone, bool forced) const {
  double logits = 0;
  int64_t different = 0, hot = 0;
  for (size_t i = 0; i < alone.size(); ++i) {
    logits = std::max(logits, RelativeError(together.logits[i], alone[i]->pass.logits));
    different += together.proposals[i] != alone[i]->pass.proposals;
    hot += together.hot[i] != together.proposals[i];
  }
  report->Judge("batching", std::max(logits, static_cast<double>(different)), 0,
                absl::StrCat("each of ", alone.size(), " sequences by itself"), "draft logits and drafts",
                "rows of one sequence read another's context, or arithmetic depends on the number of rows");
  report->Judge("draft-temperature", static_cast<double>(hot), 0, "the same passes at temperature 0",
                absl::StrCat(hot, " of ", alone.size(), " sequences drafted otherwise at temperature 1"),
                "drafts are sampled with the request's temperature");
  if (!forced) {
    report->Skip("mask-token",
                 "no output of the final norm was found for which the head chooses the mask token");
    return absl::OkStatus();
  }
  const auto stripped = std::count_if(together.forced.begin(), together.forced.end(),
                                      [&](int32_t token) { return token != own.mask_token_id; });
  report->Judge("mask-token", static_cast<double>(stripped), 0,
                "an output for which the head chooses the mask id",
                absl::StrCat(together.forced.size() - static_cast<size_t>(stripped), " of ",
                             together.forced.size(), " drafts are the mask id"),
                "drafts equal to the mask id are stripped as if they were placeholders");
  return absl::OkStatus();
}

void Checks::CheckVerifyRows(const Probe::VerifyRecord& record) const {
  report->Judge("verify-rows", RelativeError(record.together, record.alone), 0,
                "the same tokens, one step each", absl::StrCat("logits of ", record.together.rows, " rows"),
                "the logits of a row depend on the rows that are verified with it");
}

void Checks::CheckRounds(const RoundsRecord& record, int64_t block_size) const {
  int64_t wrong = 0;
  std::string first;
  for (const ScriptedRound& round : record.rounds) {
    const int64_t planned = round.planned;
    const auto begin = record.continuation.begin() + (round.anchor_position - record.start);
    const bool right = round.rows == block_size && round.accepted == planned &&
                       round.emitted == planned + 1 &&
                       round.position == round.anchor_position + planned + 1 &&
                       round.tokens == std::vector<int32_t>(begin, begin + planned + 1);
    if (right) continue;
    if (wrong++ == 0) {
      first =
          absl::StrFormat(": with %d right drafts: %d rows, %d accepted, %d emitted, anchor at +%d", planned,
                          round.rows, round.accepted, round.emitted, round.position - round.anchor_position);
    }
  }
  report->Judge(
      "acceptance", static_cast<double>(wrong), 0,
      absl::StrCat("drafts that are wrong at every depth in turn, ", record.rounds.size(), " rounds"),
      absl::StrCat(wrong, " rounds miscounted", first), "acceptance does not end at the first wrong draft");

  int64_t stores = 0;
  for (size_t i = 0; i < record.plain_state.size(); ++i)
    stores += record.plain_state[i] != record.speculative_state[i];
  report->Judge("rollback", static_cast<double>(stores), 0, "the same tokens, one step each",
                absl::StrCat(stores, " of ", record.plain_state.size(), " stores of the target differ"),
                "rejected rows are committed, or accepted ones are not");

  // Which positions of the drafter's context are not those of the accepted tokens, and what they hold.
  std::set<int64_t> positions;
  std::map<int64_t, int64_t> shifts;  // how often a position holds the row of another
  double worst = 0;
  for (size_t layer = 0; layer < record.plain_context.size(); ++layer) {
    const LayerContext& right = record.plain_context[layer];
    const LayerContext& ours = record.speculative_context[layer];
    worst = std::max({worst, RelativeError(ours.v, right.v), RelativeError(ours.k, right.k)});
    if (ours.v.rows != right.v.rows) continue;
    for (int64_t p = 0; p < right.v.rows; ++p) {
      const auto same = [](const Rows& a, int64_t i, const Rows& b, int64_t j) {
        return std::equal(a.row(i), a.row(i) + a.cols, b.row(j));
      };
      if (same(ours.v, p, right.v, p) && same(ours.k, p, right.k, p)) continue;
      positions.insert(p);
      if (layer != 0) continue;
      for (int64_t other = 0; other < right.v.rows; ++other) {
        if (other != p && same(ours.v, p, right.v, other)) ++shifts[other - p];
      }
    }
  }
  int64_t shifted = 0;
  for (const auto& [shift, count] : shifts) shifted += count;
  const bool mostly_shifted = 2 * shifted > static_cast<int64_t>(positions.size());
  report->Judge(
      "context-update", worst, 0, "the same tokens, one step each",
      absl::StrCat(positions.size(), " of ",
                   record.plain_context.empty() ? 0 : record.plain_context[0].v.rows, " positions differ",
                   positions.empty() ? std::string() : absl::StrCat(", the first at ", *positions.begin()),
                   shifted > 0
                       ? absl::StrCat("; ", shifted, " of them hold the row of another accepted token")
                       : std::string()),
      mostly_shifted ? "accepted rows are stored at positions shifted by the number of rejected drafts"
                     : "rows of rejected drafts stay in the drafter's context");
}

absl::StatusOr<Rows> Checks::OutputForMask() const {
  const int64_t mask = own.mask_token_id;
  if (mask >= vocabulary) return Rows();
  DFLASH_ASSIGN_OR_RETURN(Rows y, reference->HeadRow(mask));
  const Rows wanted = y;
  // A perceptron of one class: move away from whatever wins.
  const int rounds = vocabulary > (1 << 16) ? 20 : 300;
  for (int round = 0; round < rounds; ++round) {
    double best = -kNone, own_logit = 0;
    int64_t winner = -1;
    for (int64_t first = 0; first < vocabulary; first += 4096) {
      DFLASH_ASSIGN_OR_RETURN(const Rows logits,
                              reference->Logits(y, first, std::min<int64_t>(4096, vocabulary - first)));
      for (int64_t id = 0; id < logits.cols; ++id) {
        if (first + id == mask) {
          own_logit = logits.values[static_cast<size_t>(id)];
        } else if (logits.values[static_cast<size_t>(id)] > best) {
          best = logits.values[static_cast<size_t>(id)];
          winner = first + id;
        }
      }
    }
    double scale = 0;
    for (const double value : y.values) scale += value * value;
    scale = std::sqrt(scale / static_cast<double>(y.cols));
    for (double& value : y.values) value /= scale;
    if ((own_logit - best) / scale > 4 * gates.margin) return y;
    DFLASH_ASSIGN_OR_RETURN(const Rows other, reference->HeadRow(winner));
    for (size_t i = 0; i < y.values.size(); ++i) y.values[i] += 8 * (wanted.values[i] - other.values[i]);
  }
  return Rows();
}

}  // namespace dflash::doctor
