#include "worker/model/target.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "kernels/attention/attention.h"
#include "kernels/causal_conv/causal_conv.h"
#include "kernels/embedding/embedding.h"
#include "kernels/gated_delta_net/gated_delta_net.h"
#include "kernels/linear/linear.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/rope/rope.h"
#include "kernels/round/round.h"
#include "kernels/swiglu/swiglu.h"
#include "worker/comm/solo_communicator.h"
#include "worker/model/residual_stream.h"
#include "worker/model/sharded_sampler.h"
#include "worker/model/target_state.h"
#include "worker/model/target_weights.h"

namespace dflash {
namespace {

// Rows of one phase on their way through the layers.
struct RowGroup {
  Phase phase = Phase::kPrefill;
  const int32_t* tokens = nullptr;  // device memory, one per row
  SegmentList segments;
  int64_t rows = 0;
  // PREFILL, as of PhaseRows.
  struct Part {
    SegmentList segments;
    std::vector<StateCopy> copies;
  };
  std::vector<Part> parts;
  SegmentList checkpoints;
};

}  // namespace

// Scratch of a forward pass over rows of one phase. Outputs that Commit needs (conv inputs, keys, values) are
// kept per layer for VERIFY rows; PREFILL rows are committed layer by layer and share one buffer.
class Target::Impl {
 public:
  static absl::StatusOr<std::unique_ptr<Impl>> Load(const TargetConfig& config,
                                                    const TargetCheckpoint& checkpoint,
                                                    const Options& options, SequenceTable* table,
                                                    const Stream& stream, const ReadProgress& progress);

  absl::StatusOr<ForwardResult> Forward(const StepBatch& batch);
  absl::Status Commit(const std::vector<Accepted>& accepted);
  absl::StatusOr<VerifyResult> Verify(const VerifyRows& rows);
  absl::Status CommitVerified(const VerifyRows& rows, const int32_t* row_counts);
  absl::Status FoldPending(int32_t slot);
  absl::Status Embed(const int32_t* ids, MatrixView y);
  absl::Status Head(MatrixView x, Phase phase, MatrixView logits);
  absl::StatusOr<std::vector<std::vector<float>>> ExportState(int32_t slot);

  TargetConfig config;  // the whole model's
  TargetConfig local;   // what this rank computes with
  Options options;
  Communicator* communicator = nullptr;
  SequenceTable* table = nullptr;
  const Stream* stream = nullptr;
  TargetWeights weights;
  TargetState state;
  ShardedSampler sampler;
  HiddenStateObserver observer;
  HiddenStateForcing forcing;

 private:
  absl::StatusOr<RowGroup> UploadGroup(Phase phase, const PhaseRows& host);
  // Runs the layers; the final norm's output is left in normed_.
  absl::Status RunGroup(const RowGroup& group, int64_t first_tap_row);
  // Logits of the group's rows `wanted`, after RunGroup.
  absl::Status ComputeLogits(const RowGroup& group, const std::vector<int32_t>& wanted,
                             int64_t first_logits_row);
  // Log probabilities that sequences want of the tokens behind their rows, after RunGroup. Uses the rows of
  // logits.
  absl::Status ScoreFollowers(const StepBatch& batch, const PhaseRows& host, ForwardResult* result);
  absl::Status FullAttention(size_t layer, const RowGroup& group, ConstMatrixView x, MatrixView delta);
  absl::Status LinearAttention(size_t layer, const RowGroup& group, ConstMatrixView x, MatrixView delta);
  absl::Status FeedForward(const LayerWeights& layer, Phase phase, ConstMatrixView x, MatrixView delta);
  // Hands this rank's rows of the finished hidden state `state` to whoever wants them: the drafter's taps and
  // the observer.
  absl::Status PublishHiddenState(HiddenStateIndex state, Phase phase, ConstMatrixView rows,
                                  int64_t first_tap_row);
  // Rows of the embedding, this rank's part of their sum.
  absl::Status EmbedPart(const int32_t* ids, MatrixView y) {
    return EmbedOwnRows(ids, weights.embedding.view(), communicator->rank() * local.vocab_size, y, *stream);
  }
  ResidualLayout LayoutFor(int64_t rows) const {
    return rows >= options.shard_residual_rows ? ResidualLayout::kSharded : ResidualLayout::kReplicated;
  }
  absl::Status Upload(const Buffer& buffer, const void* data, size_t bytes) {
    return CopyToDevice(buffer.data(), data, static_cast<int64_t>(bytes), *stream);
  }
  // The projections of a VERIFY layer stay until Commit; those of PREFILL live in one shared buffer.
  Matrix& Projections(size_t layer, Phase phase) {
    return phase == Phase::kVerify ? verify_projections_[layer] : prefill_projections_;
  }
  float eps() const { return static_cast<float>(config.rms_norm_eps); }

  RopeShape rope_;
  // Widths of the stacked input projections.
  int64_t query_cols_ = 0, kv_cols_ = 0;
  int64_t value_cols_ = 0;

  // Scratch.
  std::vector<Matrix> verify_projections_;
  Matrix prefill_projections_;
  Matrix hidden_, normed_, delta_, mixed_, conv_out_, gate_up_, activated_, logits_input_;
  Matrix logits_, taps_;
  Buffer ids_, draft_ids_, followers_, prefill_segments_, verify_segments_, row_counts_;
  SoloCommunicator solo_;

  // The verification of the last Forward, which waits for Commit.
  std::vector<Segment> verified_segments_;
  VerifyRows verified_;
  bool commit_due_ = false;
};

absl::StatusOr<std::unique_ptr<Target::Impl>> Target::Impl::Load(const TargetConfig& config,
                                                                 const TargetCheckpoint& checkpoint,
                                                                 const Options& options, SequenceTable* table,
                                                                 const Stream& stream,
                                                                 const ReadProgress& progress) {
  auto impl = std::make_unique<Impl>();
  impl->config = config;
  impl->options = options;
  impl->table = table;
  impl->stream = &stream;
  const auto layer_count = static_cast<int32_t>(config.layers.size());
  for (LayerIndex tap : options.taps) {
    // The last layer's output is refused: "hidden state T" means before the final norm here and after it
    // elsewhere.
    if (Number(tap) < 0 || Number(tap) > layer_count - 2) {
      return absl::InvalidArgumentError(absl::StrCat("tap of layer ", Number(tap), " in a target of ",
                                                     layer_count, " layers: must be in [0, ", layer_count - 2,
                                                     "]"));
    }
  }
  if (impl->options.max_logits_rows == 0)
    impl->options.max_logits_rows = options.max_verify_rows + table->slots();
  impl->communicator = options.communicator == nullptr ? &impl->solo_ : options.communicator;
  const GroupRank rank = {.rank = impl->communicator->rank(), .size = impl->communicator->size()};
  if (options.shard_residual_rows == 0) {
    impl->options.shard_residual_rows =
        std::max(int64_t{64} * rank.size, impl->communicator->OneStepRows(config.hidden_size) + 1);
  }
  DFLASH_ASSIGN_OR_RETURN(impl->local, RankConfig(config, rank));
  const TargetConfig& local = impl->local;

  impl->rope_ = {.head_dim = config.head_dim, .rotary_dim = config.rotary_dim, .theta = config.rope_theta};
  impl->query_cols_ = local.num_attention_heads * config.head_dim;
  impl->kv_cols_ = local.num_key_value_heads * config.head_dim;
  impl->value_cols_ = local.linear_value_size();

  DFLASH_ASSIGN_OR_RETURN(impl->weights, LoadTargetWeights(config, checkpoint, rank, stream, progress));
  DFLASH_ASSIGN_OR_RETURN(
      impl->state, TargetState::Allocate(local, options.max_block_rows, options.checkpoints, table, stream));
  DFLASH_ASSIGN_OR_RETURN(impl->sampler,
                          ShardedSampler::Create(impl->communicator, rank.rank * local.vocab_size,
                                                 impl->options.max_logits_rows, stream));

  const DType act = ActivationDType();
  // A sharded residual pads its rows to a multiple of the ranks.
  const int64_t rows =
      ResidualStream::PaddedRows(std::max(options.max_prefill_rows, options.max_verify_rows), rank.size);
  const int64_t hidden = config.hidden_size;
  const int64_t full_cols = 2 * impl->query_cols_ + 2 * impl->kv_cols_;
  const GatedDeltaNetShape& gdn = impl->state.shape();
  const int64_t linear_cols = gdn.QkvCols() + impl->value_cols_ + 2 * gdn.value_heads;
  const size_t layers = config.layers.size();
  impl->verify_projections_.resize(layers);
  for (size_t layer = 0; layer < layers; ++layer) {
    DFLASH_ASSIGN_OR_RETURN(
        impl->verify_projections_[layer],
        Matrix::Allocate(options.max_verify_rows, impl->state.IsFull(layer) ? full_cols : linear_cols, act,
                         stream));
  }
  DFLASH_ASSIGN_OR_RETURN(
      impl->prefill_projections_,
      Matrix::Allocate(options.max_prefill_rows, std::max(full_cols, linear_cols), act, stream));
  DFLASH_ASSIGN_OR_RETURN(impl->hidden_, Matrix::Allocate(rows, hidden, act, stream));
  DFLASH_ASSIGN_OR_RETURN(impl->normed_, Matrix::Allocate(rows, hidden, act, stream));
  DFLASH_ASSIGN_OR_RETURN(impl->delta_, Matrix::Allocate(rows, hidden, act, stream));
  DFLASH_ASSIGN_OR_RETURN(
      impl->mixed_, Matrix::Allocate(rows, std::max(impl->query_cols_, impl->value_cols_), act, stream));
  DFLASH_ASSIGN_OR_RETURN(impl->conv_out_, Matrix::Allocate(rows, gdn.QkvCols(), act, stream));
  DFLASH_ASSIGN_OR_RETURN(impl->gate_up_, Matrix::Allocate(rows, 2 * local.intermediate_size, act, stream));
  DFLASH_ASSIGN_OR_RETURN(impl->activated_, Matrix::Allocate(rows, local.intermediate_size, act, stream));
  DFLASH_ASSIGN_OR_RETURN(impl->logits_input_,
                          Matrix::Allocate(impl->options.max_logits_rows, hidden, act, stream));
  DFLASH_ASSIGN_OR_RETURN(
      impl->logits_, Matrix::Allocate(impl->options.max_logits_rows, local.vocab_size, DType::kF32, stream));
  DFLASH_ASSIGN_OR_RETURN(impl->taps_,
                          Matrix::Allocate(options.max_prefill_rows + options.max_verify_rows + rank.size - 1,
                                           static_cast<int64_t>(options.taps.size()) * hidden, act, stream));
  const int64_t segment_bytes = table->slots() * int64_t{sizeof(Segment)};
  DFLASH_ASSIGN_OR_RETURN(impl->ids_, Buffer::Allocate(rows * int64_t{sizeof(int32_t)}, stream));
  DFLASH_ASSIGN_OR_RETURN(impl->draft_ids_, Buffer::Allocate(rows * int64_t{sizeof(int32_t)}, stream));
  DFLASH_ASSIGN_OR_RETURN(impl->followers_, Buffer::Allocate(rows * int64_t{sizeof(int32_t)}, stream));
  // Of the rows, of their parts, of the rows before checkpoints.
  DFLASH_ASSIGN_OR_RETURN(impl->prefill_segments_,
                          Buffer::Allocate(segment_bytes * (2 + 2 * kMaxCheckpoints), stream));
  DFLASH_ASSIGN_OR_RETURN(impl->verify_segments_, Buffer::Allocate(segment_bytes, stream));
  DFLASH_ASSIGN_OR_RETURN(impl->row_counts_,
                          Buffer::Allocate(table->slots() * int64_t{sizeof(int32_t)}, stream));
  return impl;
}

absl::StatusOr<ForwardResult> Target::Impl::Forward(const StepBatch& batch) {
  if (commit_due_) return absl::FailedPreconditionError("the last verification was not committed");
  DFLASH_RETURN_IF_ERROR(CheckBatch(batch,
                                    {.vocabulary = config.vocab_size,
                                     .prefill_rows = options.max_prefill_rows,
                                     .verify_rows = options.max_verify_rows,
                                     .block_rows = options.max_block_rows,
                                     .logits_rows = options.max_logits_rows,
                                     .checkpoints = options.checkpoints},
                                    *table));
  ForwardResult result;
  result.rows.resize(batch.sequences.size());
  result.logits_rows.resize(batch.sequences.size());
  result.log_probs.resize(batch.sequences.size());
  int64_t first_row = 0;
  int64_t first_logits = 0;
  // Rows of different phases never share a linear call: each phase has its own arithmetic.
  for (const Phase phase : {Phase::kPrefill, Phase::kVerify}) {
    const PhaseRows host = RowsOfPhase(batch, phase);
    if (host.tokens.empty()) continue;
    DFLASH_ASSIGN_OR_RETURN(const RowGroup group, UploadGroup(phase, host));
    DFLASH_RETURN_IF_ERROR(RunGroup(group, first_row));
    DFLASH_RETURN_IF_ERROR(ScoreFollowers(batch, host, &result));
    DFLASH_RETURN_IF_ERROR(ComputeLogits(group, host.logits_of, first_logits));
    for (size_t m = 0; m < host.members.size(); ++m) {
      const SequenceRows& sequence = batch.sequences[host.members[m]];
      const int64_t count = host.segments[m].row_count;
      const int64_t logits = phase == Phase::kVerify ? count : (sequence.last_logits ? 1 : 0);
      result.rows[host.members[m]] = {.first = first_row, .count = count};
      result.logits_rows[host.members[m]] = {.first = first_logits, .count = logits};
      first_row += count;
      first_logits += logits;
    }
    if (phase == Phase::kVerify) {
      verified_segments_ = host.segments;
      verified_ = {.tokens = group.tokens, .segments = group.segments, .rows = group.rows};
      commit_due_ = true;
      continue;
    }
    for (const Segment& segment : host.segments) {
      DFLASH_RETURN_IF_ERROR(table->AdvancePrompt(segment.slot, segment.row_count));
    }
  }
  result.logits = logits_.Rows(first_logits);
  result.taps = taps_.Rows(first_row);
  return result;
}

absl::StatusOr<RowGroup> Target::Impl::UploadGroup(Phase phase, const PhaseRows& host) {
  const Buffer& device = phase == Phase::kVerify ? verify_segments_ : prefill_segments_;
  // All lists of segments behind one another.
  std::vector<Segment> segments;
  const auto add = [&](const std::vector<Segment>& list) {
    const SegmentList added = {.data = device.As<Segment>() + segments.size(),
                               .count = static_cast<int64_t>(list.size())};
    segments.insert(segments.end(), list.begin(), list.end());
    return added;
  };
  RowGroup group = {.phase = phase,
                    .tokens = ids_.As<int32_t>(),
                    .segments = add(host.segments),
                    .rows = static_cast<int64_t>(host.tokens.size()),
                    .parts = {},
                    .checkpoints = add(host.checkpoints)};
  for (const PhaseRows::Part& part : host.parts)
    group.parts.push_back({.segments = add(part.segments), .copies = part.copies});
  DFLASH_RETURN_IF_ERROR(Upload(device, segments.data(), segments.size() * sizeof(Segment)));
  DFLASH_RETURN_IF_ERROR(Upload(ids_, host.tokens.data(), host.tokens.size() * sizeof(int32_t)));
  return group;
}

absl::StatusOr<VerifyResult> Target::Impl::Verify(const VerifyRows& rows) {
  if (rows.rows < 1 || rows.rows > options.max_verify_rows || rows.segments.count > table->slots()) {
    return absl::InvalidArgumentError(absl::StrCat("a verification of ", rows.rows, " rows and ",
                                                   rows.segments.count, " sequences; at most ",
                                                   options.max_verify_rows, " and ", table->slots()));
  }
  const RowGroup group = {.phase = Phase::kVerify,
                          .tokens = rows.tokens,
                          .segments = rows.segments,
                          .rows = rows.rows,
                          .parts = {},
                          .checkpoints = {}};
  DFLASH_RETURN_IF_ERROR(RunGroup(group, /*first_tap_row=*/0));
  const VerifyResult result = {.logits = logits_.Rows(rows.rows), .taps = taps_.Rows(rows.rows)};
  DFLASH_RETURN_IF_ERROR(
      Linear(normed_.Rows(rows.rows), weights.head, Phase::kVerify, result.logits, *stream));
  return result;
}

absl::Status Target::Impl::RunGroup(const RowGroup& group, int64_t first_tap_row) {
  const Phase phase = group.phase;
  ResidualStream residual(communicator, LayoutFor(group.rows), group.rows,
                          {.hidden = hidden_.view(), .normed = normed_.view(), .product = delta_.view()},
                          eps(), *stream);
  const MatrixView x = residual.normed();
  const MatrixView delta = residual.product();
  const int64_t own_tap_row = first_tap_row + residual.first_row();

  DFLASH_RETURN_IF_ERROR(EmbedPart(group.tokens, residual.embedding()));
  DFLASH_RETURN_IF_ERROR(residual.Begin());
  DFLASH_RETURN_IF_ERROR(PublishHiddenState(HiddenStateIndex{0}, phase, residual.own_rows(), own_tap_row));
  for (size_t i = 0; i < weights.layers.size(); ++i) {
    const LayerWeights& layer = weights.layers[i];
    if (i > 0) {
      DFLASH_RETURN_IF_ERROR(residual.AddNorm(layer.input_norm.view()));
      const LayerIndex finished{static_cast<int32_t>(i) - 1};
      DFLASH_RETURN_IF_ERROR(PublishHiddenState(OutputOf(finished), phase, residual.own_rows(), own_tap_row));
    }
    bool is_forced = false;
    if (forcing) {
      DFLASH_ASSIGN_OR_RETURN(is_forced,
                              forcing(HiddenStateIndex{static_cast<int32_t>(i)}, phase, residual.own_rows()));
    }
    if (i == 0 || is_forced) DFLASH_RETURN_IF_ERROR(residual.Norm(layer.input_norm.view()));
    DFLASH_RETURN_IF_ERROR(state.IsFull(i) ? FullAttention(i, group, x, delta)
                                           : LinearAttention(i, group, x, delta));
    DFLASH_RETURN_IF_ERROR(residual.AddNorm(layer.post_attention_norm.view()));
    DFLASH_RETURN_IF_ERROR(FeedForward(layer, phase, x, delta));
  }
  DFLASH_RETURN_IF_ERROR(residual.AddNorm(weights.final_norm.view()));
  if (!options.taps.empty()) {
    const int64_t tap_rows = ResidualStream::PaddedRows(group.rows, communicator->size());
    DFLASH_RETURN_IF_ERROR(residual.GatherTaps(taps_.view().Rows(first_tap_row, tap_rows)));
  }
  if (observer) observer(HiddenStateIndex{static_cast<int32_t>(weights.layers.size())}, phase, x);
  return absl::OkStatus();
}

absl::Status Target::Impl::ComputeLogits(const RowGroup& group, const std::vector<int32_t>& wanted,
                                         int64_t first_logits_row) {
  if (wanted.empty()) return absl::OkStatus();
  const auto count = static_cast<int64_t>(wanted.size());
  ConstMatrixView head_input = normed_.Rows(group.rows);
  if (count != group.rows) {
    for (int64_t i = 0; i < count; ++i) {
      DFLASH_RETURN_IF_ERROR(CopyRows(head_input.Rows(wanted[static_cast<size_t>(i)], 1),
                                      logits_input_.view().Rows(i, 1), *stream));
    }
    head_input = logits_input_.Rows(count);
  }
  // A prompt's last row is sampled like any verified row, so its logits use the arithmetic of VERIFY rows.
  return Linear(head_input, weights.head, Phase::kVerify, logits_.view().Rows(first_logits_row, count),
                *stream);
}

absl::Status Target::Impl::ScoreFollowers(const StepBatch& batch, const PhaseRows& host,
                                          ForwardResult* result) {
  for (size_t m = 0; m < host.members.size(); ++m) {
    const SequenceRows& sequence = batch.sequences[host.members[m]];
    if (sequence.log_probs == 0) continue;
    std::vector<int32_t> followers(sequence.tokens.begin() + 1, sequence.tokens.end());
    if (sequence.next_token >= 0) followers.push_back(sequence.next_token);
    const auto size = static_cast<int64_t>(followers.size());
    const int32_t top = std::min(sequence.log_probs - 1, kMaxTopLogProbs);
    // A prompt has more rows than there are rows of logits. Theirs is the arithmetic of VERIFY rows, as an
    // output's.
    for (int64_t first = 0; first < size; first += options.max_logits_rows) {
      const int64_t count = std::min(options.max_logits_rows, size - first);
      const MatrixView logits = logits_.Rows(count);
      DFLASH_RETURN_IF_ERROR(Linear(normed_.view().Rows(host.segments[m].first_row + first, count),
                                    weights.head, Phase::kVerify, logits, *stream));
      DFLASH_RETURN_IF_ERROR(
          Upload(followers_, followers.data() + first, static_cast<size_t>(count) * sizeof(int32_t)));
      DFLASH_RETURN_IF_ERROR(sampler.LogProbs(logits, batch.vocabulary, followers_.As<int32_t>(), top,
                                              &result->log_probs[host.members[m]]));
    }
  }
  return absl::OkStatus();
}

absl::Status Target::Impl::PublishHiddenState(HiddenStateIndex state, Phase phase, ConstMatrixView rows,
                                              int64_t first_tap_row) {
  if (observer) observer(state, phase, rows);
  for (size_t tap = 0; tap < options.taps.size(); ++tap) {
    if (OutputOf(options.taps[tap]) != state) continue;
    const auto column = static_cast<int64_t>(tap) * config.hidden_size;
    DFLASH_RETURN_IF_ERROR(
        CopyRows(rows, taps_.view().Block(first_tap_row, rows.rows, column, config.hidden_size), *stream));
  }
  return absl::OkStatus();
}

absl::Status Target::Impl::FullAttention(size_t index, const RowGroup& group, ConstMatrixView x,
                                         MatrixView delta) {
  const FullAttentionWeights& w = *weights.layers[index].full;
  const Phase phase = group.phase;
  const SegmentList segments = group.segments;
  // Columns of the stacked projection: queries, output gates, keys, values.
  const MatrixView all = Projections(index, phase).view().Block(0, x.rows, 0, w.in.out_features());
  const MatrixView q = all.Cols(0, query_cols_);
  const MatrixView gate = all.Cols(query_cols_, query_cols_);
  const MatrixView k = all.Cols(2 * query_cols_, kv_cols_);
  const MatrixView v = all.Cols(2 * query_cols_ + kv_cols_, kv_cols_);
  const MatrixView out = mixed_.view().Block(0, x.rows, 0, query_cols_);
  DFLASH_RETURN_IF_ERROR(Linear(x, w.in, phase, all, *stream));
  DFLASH_RETURN_IF_ERROR(NormAndRope(q, w.q_norm.view(), k, w.k_norm.view(), NormWeight::kOnePlus, eps(),
                                     rope_, segments, *stream));
  const float scale = 1.0f / std::sqrt(static_cast<float>(config.head_dim));
  DFLASH_RETURN_IF_ERROR(Attention(q, k, v, segments, nullptr, table->page_table(), state.Pool(index),
                                   AttentionMask{}, scale, phase, out, *stream,
                                   ContextWritten::kBeforeLastNormAndRope, gate));
  if (phase == Phase::kPrefill) {
    DFLASH_RETURN_IF_ERROR(
        StoreKeyValue(k, v, segments, nullptr, table->page_table(), state.Pool(index), *stream));
  }
  return Linear(out, w.out, phase, delta, *stream);
}

absl::Status Target::Impl::LinearAttention(size_t index, const RowGroup& group, ConstMatrixView x,
                                           MatrixView delta) {
  const LinearAttentionWeights& w = *weights.layers[index].linear;
  const Phase phase = group.phase;
  const SegmentList segments = group.segments;
  // Columns of the stacked projection: conv inputs (q, k, v), output gates z, update logits b, decay logits
  // a.
  const MatrixView all = Projections(index, phase).view().Block(0, x.rows, 0, w.in.out_features());
  const GatedDeltaNetShape& gdn = state.shape();
  const int64_t qkv_cols = gdn.QkvCols();
  const MatrixView conv_in = all.Cols(0, qkv_cols);
  const MatrixView z = all.Cols(qkv_cols, value_cols_);
  const MatrixView conv_out = conv_out_.Rows(x.rows);
  const MatrixView out = mixed_.view().Block(0, x.rows, 0, value_cols_);
  DFLASH_RETURN_IF_ERROR(Linear(x, w.in, phase, all, *stream));
  GatedDeltaNetInput input = {.qkv = conv_in,
                              .beta = all.Cols(qkv_cols + value_cols_, gdn.value_heads),
                              .decay = all.Cols(qkv_cols + value_cols_ + gdn.value_heads, gdn.value_heads),
                              .a_log = w.a_log.As<float>(),
                              .dt_bias = w.dt_bias.As<float>()};
  if (phase == Phase::kVerify) {
    const GatedDeltaNetSurroundings around = {.conv_weight = w.conv.view(),
                                              .conv_state = state.Conv(index),
                                              .norm_weight = w.norm.view(),
                                              .z = z,
                                              .gate = config.gate_activation,
                                              .eps = eps()};
    DFLASH_RETURN_IF_ERROR(GatedDeltaNetMixerVerify(gdn, input, around, segments, table->pending(),
                                                    state.Recurrent(index), conv_out, out, *stream));
  } else {
    DFLASH_RETURN_IF_ERROR(
        CausalConv(conv_in, w.conv.view(), segments, state.Conv(index), conv_out, *stream));
    input.qkv = conv_out;
    DFLASH_RETURN_IF_ERROR(AdvanceConvState(conv_in, segments, nullptr, state.Conv(index), *stream));
    if (group.checkpoints.count > 0) {
      // A checkpoint lies at least as many rows behind the beginning as the state has.
      DFLASH_RETURN_IF_ERROR(
          AdvanceConvState(conv_in, group.checkpoints, nullptr, state.CheckpointConv(index), *stream));
    }
    for (const RowGroup::Part& part : group.parts) {
      DFLASH_RETURN_IF_ERROR(
          GatedDeltaNetPrefill(gdn, input, part.segments, state.Recurrent(index), out, *stream));
      for (const StateCopy& copy : part.copies) {
        DFLASH_RETURN_IF_ERROR(state.KeepRecurrent(index, copy.slot, copy.checkpoint));
      }
    }
    DFLASH_RETURN_IF_ERROR(GatedRmsNorm(out, w.norm.view(), z, config.gate_activation, eps(), out, *stream));
  }
  return Linear(out, w.out, phase, delta, *stream);
}

absl::Status Target::Impl::FeedForward(const LayerWeights& layer, Phase phase, ConstMatrixView x,
                                       MatrixView delta) {
  const MatrixView gate_up = gate_up_.Rows(x.rows);
  const MatrixView activated = activated_.Rows(x.rows);
  DFLASH_RETURN_IF_ERROR(LinearSwiGlu(x, layer.gate_up, phase, gate_up, activated, *stream));
  return Linear(activated, layer.down, phase, delta, *stream);
}

// Where only rank 0 drafts, the others learn here what it embeds and projects.
absl::Status Target::Impl::Embed(const int32_t* ids, MatrixView y) {
  if (communicator->size() == 1) return EmbedRows(ids, weights.embedding.view(), y, *stream);
  if (options.draft_placement == DraftPlacement::kRankZero) {
    const int64_t bytes = y.rows * int64_t{sizeof(int32_t)};
    if (bytes > draft_ids_.bytes())
      return absl::InvalidArgumentError(absl::StrCat("an embedding of ", y.rows, " rows is too large"));
    if (communicator->rank() == 0) {
      DFLASH_RETURN_IF_ERROR(CopyRows(ConstMatrixView(ids, DType::kF32, 1, y.rows, y.rows),
                                      MatrixView(draft_ids_.data(), DType::kF32, 1, y.rows, y.rows),
                                      *stream));
    }
    DFLASH_RETURN_IF_ERROR(communicator->Broadcast(draft_ids_.data(), bytes, /*root=*/0, *stream));
    ids = draft_ids_.As<int32_t>();
  }
  DFLASH_RETURN_IF_ERROR(EmbedPart(ids, y));
  return communicator->AllReduce(y.data, y.rows * y.cols, y.dtype, *stream);
}

absl::Status Target::Impl::Head(MatrixView x, Phase phase, MatrixView logits) {
  if (communicator->size() > 1 && options.draft_placement == DraftPlacement::kRankZero) {
    DFLASH_RETURN_IF_ERROR(
        communicator->Broadcast(x.data, x.rows * x.cols * SizeOf(x.dtype), /*root=*/0, *stream));
  }
  return Linear(x, weights.head, phase, logits, *stream);
}

absl::Status Target::Impl::Commit(const std::vector<Accepted>& accepted) {
  if (!commit_due_) return absl::FailedPreconditionError("no verification waits for a commit");
  std::vector<int32_t> counts;
  if (accepted.size() != verified_segments_.size())
    return absl::InvalidArgumentError("commit every verified sequence, in batch order");
  for (size_t i = 0; i < accepted.size(); ++i) {
    if (accepted[i].slot != verified_segments_[i].slot || accepted[i].rows < 1 ||
        accepted[i].rows > verified_segments_[i].row_count) {
      return absl::InvalidArgumentError(
          absl::StrCat("slot ", accepted[i].slot, " cannot commit ", accepted[i].rows, " rows"));
    }
    counts.push_back(static_cast<int32_t>(accepted[i].rows));
  }
  commit_due_ = false;
  DFLASH_RETURN_IF_ERROR(Upload(row_counts_, counts.data(), counts.size() * sizeof(int32_t)));
  DFLASH_RETURN_IF_ERROR(CommitVerified(verified_, row_counts_.As<int32_t>()));
  for (const Accepted& sequence : accepted) {
    SequenceLengths& lengths = table->lengths(sequence.slot);
    lengths.target_kv += sequence.rows;
    lengths.gdn_folded += std::exchange(lengths.gdn_pending, sequence.rows);
  }
  return absl::OkStatus();
}

absl::Status Target::Impl::CommitVerified(const VerifyRows& verified, const int32_t* row_counts) {
  // All layers of a kind at once: they are small.
  std::vector<KeyValueRows> full_layers;
  std::vector<ConvCommit> linear_layers;
  for (size_t layer = 0; layer < weights.layers.size(); ++layer) {
    const MatrixView all = verify_projections_[layer].Rows(verified.rows);
    if (state.IsFull(layer)) {
      full_layers.push_back({.k = all.Cols(2 * query_cols_, kv_cols_),
                             .v = all.Cols(2 * query_cols_ + kv_cols_, kv_cols_),
                             .pool = state.Pool(layer)});
    } else {
      linear_layers.push_back({.x = all.Cols(0, state.shape().QkvCols()), .state = state.Conv(layer)});
    }
  }
  DFLASH_RETURN_IF_ERROR(
      StoreKeyValues(full_layers, verified.segments, row_counts, table->page_table(), *stream));
  DFLASH_RETURN_IF_ERROR(AdvanceConvStates(linear_layers, verified.segments, row_counts, *stream));
  return AdvanceTargetLengths(verified.segments, row_counts, table->device_lengths(), *stream);
}

absl::Status Target::Impl::FoldPending(int32_t slot) {
  if (table->lengths(slot).gdn_pending == 0) return absl::OkStatus();
  DFLASH_RETURN_IF_ERROR(Upload(row_counts_, &slot, sizeof(slot)));
  DFLASH_RETURN_IF_ERROR(state.Fold(row_counts_.As<int32_t>(), 1));
  return table->SetFolded(slot);
}

absl::StatusOr<std::vector<std::vector<float>>> Target::Impl::ExportState(int32_t slot) {
  DFLASH_RETURN_IF_ERROR(FoldPending(slot));
  return state.Export(slot);
}

Target::Target(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Target::~Target() = default;

absl::StatusOr<std::unique_ptr<Target>> Target::Load(const TargetConfig& config,
                                                     const TargetCheckpoint& checkpoint,
                                                     const Options& options, SequenceTable* table,
                                                     const Stream& stream, const ReadProgress& progress) {
  DFLASH_ASSIGN_OR_RETURN(std::unique_ptr<Impl> impl,
                          Impl::Load(config, checkpoint, options, table, stream, progress));
  return std::unique_ptr<Target>(new Target(std::move(impl)));
}

absl::Status Target::Open(int32_t slot) { return impl_->state.Open(slot); }
absl::Status Target::Restore(int32_t slot, int32_t checkpoint) {
  return impl_->state.Restore(slot, checkpoint);
}
absl::Status Target::FillPages(const std::vector<int32_t>& pages, float value) {
  return impl_->state.FillPages(pages, value);
}
int64_t Target::checkpoints() const { return impl_->options.checkpoints; }
absl::StatusOr<ForwardResult> Target::Forward(const StepBatch& batch) { return impl_->Forward(batch); }
absl::Status Target::Commit(const std::vector<Accepted>& accepted) { return impl_->Commit(accepted); }
absl::StatusOr<VerifyResult> Target::Verify(const VerifyRows& rows) { return impl_->Verify(rows); }
absl::Status Target::CommitVerified(const VerifyRows& rows, const int32_t* row_counts) {
  return impl_->CommitVerified(rows, row_counts);
}
absl::Status Target::FoldPending(int32_t slot) { return impl_->FoldPending(slot); }
absl::StatusOr<std::vector<std::vector<float>>> Target::ExportState(int32_t slot) {
  return impl_->ExportState(slot);
}
void Target::set_observer(HiddenStateObserver observer) { impl_->observer = std::move(observer); }
void Target::set_forcing(HiddenStateForcing forcing) {
  DFLASH_CHECK(impl_->communicator->size() == 1, "hidden states are forced in a group of one only");
  impl_->forcing = std::move(forcing);
}
const TargetConfig& Target::config() const { return impl_->config; }
const std::vector<LayerIndex>& Target::taps() const { return impl_->options.taps; }

Communicator& Target::communicator() const { return *impl_->communicator; }
DraftPlacement Target::draft_placement() const { return impl_->options.draft_placement; }
int64_t Target::logits_cols() const { return impl_->local.vocab_size; }

absl::Status Target::Embed(const int32_t* ids, MatrixView y) { return impl_->Embed(ids, y); }
absl::Status Target::Head(MatrixView x, Phase phase, MatrixView logits) {
  return impl_->Head(x, phase, logits);
}
absl::Status Target::Sample(ConstMatrixView logits, const SamplingParams* params, const int64_t* positions,
                            int64_t vocabulary, SamplingReach reach, int32_t* tokens) {
  return impl_->sampler.Sample(logits, params, positions, vocabulary, reach, tokens);
}
absl::Status Target::SampleProcessed(MatrixView logits, const SamplingParams* params,
                                     const int64_t* positions, int64_t vocabulary, SamplingReach reach,
                                     const RowProcessing& processing, int32_t* tokens,
                                     std::vector<TokenLogProbs>* log_probs) {
  return impl_->sampler.SampleProcessed(logits, params, positions, vocabulary, reach, processing, tokens,
                                        log_probs);
}
absl::Status Target::ChooseDrafts(ConstMatrixView logits, int64_t vocabulary, int32_t* tokens,
                                  float* confidences) {
  return impl_->sampler.ChooseDrafts(logits, vocabulary, tokens, confidences);
}

}  // namespace dflash
