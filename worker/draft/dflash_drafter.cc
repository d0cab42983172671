#include "worker/draft/dflash_drafter.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/attention/attention.h"
#include "kernels/linear/linear.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/rope/rope.h"
#include "kernels/round/round.h"
#include "kernels/swiglu/swiglu.h"
#include "worker/draft/dflash_weights.h"
#include "worker/model/state_export.h"

namespace dflash {

class DFlashDrafter::Impl {
 public:
  static absl::StatusOr<std::unique_ptr<Impl>> Load(const DraftConfig& config,
                                                    const DraftCheckpoint& checkpoint,
                                                    const FeatureContract& contract, const Options& options,
                                                    Target* target, SequenceTable* table,
                                                    const Stream& stream, const ReadProgress& progress);
  absl::Status Ingest(ConstMatrixView taps, const std::vector<CommittedRows>& rows);
  absl::Status IngestVerified(ConstMatrixView taps, SegmentList segments, const int32_t* row_counts);
  absl::Status Propose(DecodeStates states, const int32_t* slots, int64_t count, const Proposals& proposals);

  FeatureContract contract;
  DraftConfig config;  // what this rank computes with
  Options options;
  Target* target = nullptr;
  SequenceTable* table = nullptr;
  const Stream* stream = nullptr;

  float eps() const { return static_cast<float>(config.rms_norm_eps); }
  AttentionMask Mask(size_t layer) const {
    return {.causal = contract.layers[layer].causal, .window = contract.layers[layer].window};
  }
  KeyValuePool Pool(size_t layer) const {
    return {.data = context_pages_[layer].data(),
            .page_count = table->pages(),
            .kv_heads = config.num_key_value_heads,
            .head_dim = config.head_dim};
  }

  ConstMatrixView last_context_features, last_draft_logits;
  DraftObserver observer;

 private:
  absl::Status CheckTaps(ConstMatrixView taps) const;
  absl::Status Observe(DraftStage stage, size_t layer, MatrixView rows) const {
    return observer ? observer(stage, layer, rows) : absl::OkStatus();
  }
  // row_counts null: all rows of every segment.
  absl::Status IngestRows(Phase phase, ConstMatrixView taps, SegmentList segments, const int32_t* row_counts);
  // Sums a row-parallel product over the ranks that share the drafter.
  absl::Status Sum(MatrixView product) {
    if (!sharded_) return absl::OkStatus();
    return target->communicator().AllReduce(product.data, product.rows * product.cols, product.dtype,
                                            *stream);
  }
  // h += the product, summed over the ranks that share the drafter; y = norm(h).
  absl::Status AddNorm(MatrixView h, MatrixView product, const Matrix& weight, MatrixView y) {
    if (!sharded_) return AddRmsNorm(h, product, weight.view(), contract.norm_weight, eps(), y, *stream);
    return target->communicator().AllReduceAddRmsNorm(product, h, weight.view(), contract.norm_weight, eps(),
                                                      y, *stream);
  }
  // A layer up to its attention, whose output it leaves in attended_, and the rest of it: that leaves this
  // rank's part of the output of the feed-forward block in delta_, for the next AddNorm.
  absl::Status Attend(size_t layer, SegmentList segments, MatrixView h);
  absl::Status FeedForward(size_t layer, ConstMatrixView attended, MatrixView h);
  // Rows [first, first + taken) of every `block` rows; all of it dense.
  absl::Status TakeRows(ConstMatrixView rows, int64_t block, int64_t first, int64_t taken, MatrixView to);

  DFlashWeights weights_;
  RopeShape rope_;
  int64_t query_cols_ = 0, kv_cols_ = 0;
  bool sharded_ = false;                      // over the ranks of the group
  int64_t first_tap_col_ = 0, tap_cols_ = 0;  // of the taps: what this rank's part of fc reads
  std::vector<Buffer> context_pages_;         // per layer: keys and values of committed positions

  // Scratch of an ingestion, then of a block pass.
  Matrix fused_, context_features_, context_kv_;
  Matrix hidden_, normed_, delta_, q_, kv_, attended_, gate_up_, activated_;
  Matrix head_input_, logits_;
  Buffer ids_, segments_;
};

absl::StatusOr<std::unique_ptr<DFlashDrafter::Impl>> DFlashDrafter::Impl::Load(
    const DraftConfig& config, const DraftCheckpoint& checkpoint, const FeatureContract& contract,
    const Options& options, Target* target, SequenceTable* table, const Stream& stream,
    const ReadProgress& progress) {
  auto impl = std::make_unique<Impl>();
  impl->contract = contract;
  impl->options = options;
  impl->target = target;
  impl->table = table;
  impl->stream = &stream;
  const TargetConfig& target_config = target->config();
  if (contract.taps != target->taps()) {
    return absl::InvalidArgumentError("the target does not tap the layers that the feature contract names");
  }
  if (contract.layers.size() != static_cast<size_t>(config.num_layers())) {
    return absl::InvalidArgumentError(absl::StrCat("the feature contract has masks of ",
                                                   contract.layers.size(), " layers, the drafter has ",
                                                   config.num_layers()));
  }
  if (config.hidden_size != target_config.hidden_size) {
    return absl::InvalidArgumentError(absl::StrCat("drafter hidden_size ", config.hidden_size,
                                                   " is not the target's ", target_config.hidden_size));
  }
  if (options.vocabulary < 1 || options.vocabulary > target_config.vocab_size) {
    return absl::InvalidArgumentError(absl::StrCat("vocabulary of ", options.vocabulary,
                                                   " ids for a head of ", target_config.vocab_size, " rows"));
  }
  GroupRank rank;
  if (target->draft_placement() == DraftPlacement::kSharded) {
    rank = {.rank = target->communicator().rank(), .size = target->communicator().size()};
  } else if (target->communicator().rank() != 0) {
    return absl::InvalidArgumentError("the drafter runs on rank 0 only");
  }
  impl->sharded_ = rank.size > 1;
  DFLASH_ASSIGN_OR_RETURN(impl->config, RankConfig(config, rank));
  const DraftConfig& local = impl->config;
  impl->tap_cols_ = config.num_taps() * config.hidden_size / rank.size;
  impl->first_tap_col_ = rank.rank * impl->tap_cols_;
  const auto rotary_dim =
      static_cast<int64_t>(std::lround(contract.rotary_fraction * static_cast<double>(config.head_dim)));
  impl->rope_ = {.head_dim = config.head_dim, .rotary_dim = rotary_dim, .theta = contract.rope_theta};
  impl->query_cols_ = local.num_attention_heads * config.head_dim;
  impl->kv_cols_ = local.num_key_value_heads * config.head_dim;
  DFLASH_ASSIGN_OR_RETURN(impl->weights_, LoadDFlashWeights(config, checkpoint, rank, stream, progress));

  const DType act = ActivationDType();
  const int64_t rows = options.max_sequences * contract.block_size;
  const int64_t ingest_rows = std::max(options.max_ingest_rows, rows);
  const int64_t hidden = config.hidden_size;
  impl->context_pages_.resize(static_cast<size_t>(config.num_layers()));
  for (size_t layer = 0; layer < impl->context_pages_.size(); ++layer) {
    DFLASH_ASSIGN_OR_RETURN(impl->context_pages_[layer],
                            Buffer::Allocate(table->pages() * impl->Pool(layer).PageBytes(), stream));
  }
  DFLASH_ASSIGN_OR_RETURN(impl->fused_, Matrix::Allocate(ingest_rows, hidden, act, stream));
  DFLASH_ASSIGN_OR_RETURN(impl->context_features_, Matrix::Allocate(ingest_rows, hidden, act, stream));
  DFLASH_ASSIGN_OR_RETURN(impl->context_kv_, Matrix::Allocate(ingest_rows, 2 * impl->kv_cols_, act, stream));
  DFLASH_ASSIGN_OR_RETURN(impl->hidden_, Matrix::Allocate(rows, hidden, act, stream));
  DFLASH_ASSIGN_OR_RETURN(impl->normed_, Matrix::Allocate(rows, hidden, act, stream));
  DFLASH_ASSIGN_OR_RETURN(impl->delta_, Matrix::Allocate(rows, hidden, act, stream));
  DFLASH_ASSIGN_OR_RETURN(impl->q_, Matrix::Allocate(rows, impl->query_cols_, act, stream));
  DFLASH_ASSIGN_OR_RETURN(impl->kv_, Matrix::Allocate(rows, 2 * impl->kv_cols_, act, stream));
  DFLASH_ASSIGN_OR_RETURN(impl->attended_, Matrix::Allocate(rows, impl->query_cols_, act, stream));
  DFLASH_ASSIGN_OR_RETURN(impl->gate_up_, Matrix::Allocate(rows, 2 * local.intermediate_size, act, stream));
  DFLASH_ASSIGN_OR_RETURN(impl->activated_, Matrix::Allocate(rows, local.intermediate_size, act, stream));
  DFLASH_ASSIGN_OR_RETURN(impl->head_input_, Matrix::Allocate(rows, hidden, act, stream));
  DFLASH_ASSIGN_OR_RETURN(impl->logits_, Matrix::Allocate(rows, target->logits_cols(), DType::kF32, stream));
  DFLASH_ASSIGN_OR_RETURN(impl->ids_, Buffer::Allocate(rows * int64_t{sizeof(int32_t)}, stream));
  DFLASH_ASSIGN_OR_RETURN(
      impl->segments_,
      Buffer::Allocate(std::max<int64_t>(options.max_sequences, 1) * int64_t{sizeof(Segment)}, stream));
  return impl;
}

absl::Status DFlashDrafter::Impl::CheckTaps(ConstMatrixView taps) const {
  const int64_t cols = static_cast<int64_t>(contract.taps.size()) * config.hidden_size;
  if (taps.cols == cols) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("taps are ", taps.cols, " wide, the drafter reads ", cols));
}

absl::Status DFlashDrafter::Impl::Ingest(ConstMatrixView taps, const std::vector<CommittedRows>& rows) {
  DFLASH_RETURN_IF_ERROR(CheckTaps(taps));
  for (const CommittedRows& sequence : rows) {
    if (sequence.start_position != table->lengths(sequence.slot).draft_context_end) {
      return absl::InvalidArgumentError(
          absl::StrCat("slot ", sequence.slot, ": taps of position ", sequence.start_position,
                       " after a context that ends at ", table->lengths(sequence.slot).draft_context_end));
    }
    for (int64_t done = 0; done < sequence.row_count; done += options.max_ingest_rows) {
      const int64_t count = std::min(options.max_ingest_rows, sequence.row_count - done);
      const Segment segment = {.slot = sequence.slot,
                               .first_row = 0,
                               .row_count = static_cast<int32_t>(count),
                               .start_position = static_cast<int32_t>(sequence.start_position + done)};
      DFLASH_RETURN_IF_ERROR(CopyToDevice(segments_.data(), &segment, sizeof(segment), *stream));
      DFLASH_RETURN_IF_ERROR(IngestRows(sequence.phase, taps.Rows(sequence.first_row + done, count),
                                        {.data = segments_.As<Segment>(), .count = 1}, nullptr));
    }
    DFLASH_RETURN_IF_ERROR(table->AdvanceDraftContext(sequence.slot, sequence.row_count));
  }
  return absl::OkStatus();
}

absl::Status DFlashDrafter::Impl::IngestVerified(ConstMatrixView taps, SegmentList segments,
                                                 const int32_t* row_counts) {
  DFLASH_RETURN_IF_ERROR(CheckTaps(taps));
  if (taps.rows > fused_.view().rows) {
    return absl::InvalidArgumentError(
        absl::StrCat("taps of ", taps.rows, " rows, at most ", fused_.view().rows));
  }
  DFLASH_RETURN_IF_ERROR(IngestRows(Phase::kVerify, taps, segments, row_counts));
  return AdvanceDraftLengths(segments, row_counts, table->device_lengths(), *stream);
}

// Context features c = norm(fc taps), then every layer's keys and values of them. input_layernorm is not
// applied to c, and c never goes through q, o or the feed-forward block.
absl::Status DFlashDrafter::Impl::IngestRows(Phase phase, ConstMatrixView taps, SegmentList segments,
                                             const int32_t* row_counts) {
  const MatrixView fused = fused_.Rows(taps.rows);
  const MatrixView c = context_features_.Rows(taps.rows);
  const MatrixView kv = context_kv_.Rows(taps.rows);
  const MatrixView k = kv.Cols(0, kv_cols_);
  DFLASH_RETURN_IF_ERROR(Linear(taps.Cols(first_tap_col_, tap_cols_), weights_.fc, phase, fused, *stream));
  DFLASH_RETURN_IF_ERROR(Sum(fused));
  DFLASH_RETURN_IF_ERROR(
      RmsNorm(fused, weights_.hidden_norm.view(), contract.norm_weight, eps(), c, *stream));
  last_context_features = c;
  for (size_t layer = 0; layer < weights_.layers.size(); ++layer) {
    const DFlashLayerWeights& w = weights_.layers[layer];
    DFLASH_RETURN_IF_ERROR(Linear(c, w.kv, phase, kv, *stream));
    DFLASH_RETURN_IF_ERROR(NormAndRope(k.Cols(0, 0), w.q_norm.view(), k, w.k_norm.view(),
                                       contract.norm_weight, eps(), rope_, segments, *stream));
    DFLASH_RETURN_IF_ERROR(StoreKeyValue(k, kv.Cols(kv_cols_, kv_cols_), segments, row_counts,
                                         table->page_table(), Pool(layer), *stream));
  }
  return absl::OkStatus();
}

// The block is [anchor, mask, ..., mask]: row j sits at position s + j and predicts the token of that same
// position.
absl::Status DFlashDrafter::Impl::Propose(DecodeStates states, const int32_t* slots, int64_t count,
                                          const Proposals& proposals) {
  const int64_t block = contract.block_size, depth = proposals.depth;
  if (count > options.max_sequences || depth < 1 || depth >= block) {
    return absl::InvalidArgumentError(absl::StrCat(count, " anchors, at most ", options.max_sequences, ", ",
                                                   depth, " tokens each, at most ", block - 1));
  }
  if (count == 0) return absl::OkStatus();
  const int64_t rows = count * block;
  DFLASH_RETURN_IF_ERROR(MakeDraftBlocks(states, slots, count, block, contract.mask_token_id,
                                         ids_.As<int32_t>(), segments_.As<Segment>(), *stream));
  const SegmentList segments = {.data = segments_.As<Segment>(), .count = count};
  MatrixView h = hidden_.Rows(rows);
  DFLASH_RETURN_IF_ERROR(target->Embed(ids_.As<int32_t>(), h));
  const int64_t kept = 1 + depth;
  for (size_t layer = 0; layer < weights_.layers.size(); ++layer) {
    DFLASH_RETURN_IF_ERROR(Attend(layer, segments, h));
    MatrixView attended = attended_.Rows(rows);
    if (layer + 1 == weights_.layers.size() && kept < block) {
      // The others were there for the keys and values that these see. Their places are free by now.
      const MatrixView kept_h = fused_.Rows(count * kept), kept_attended = q_.Rows(count * kept);
      DFLASH_RETURN_IF_ERROR(TakeRows(h, block, 0, kept, kept_h));
      DFLASH_RETURN_IF_ERROR(TakeRows(attended, block, 0, kept, kept_attended));
      h = kept_h;
      attended = kept_attended;
    }
    DFLASH_RETURN_IF_ERROR(FeedForward(layer, attended, h));
  }
  const MatrixView y = normed_.Rows(h.rows);
  DFLASH_RETURN_IF_ERROR(AddNorm(h, delta_.Rows(h.rows), weights_.norm, y));
  DFLASH_RETURN_IF_ERROR(Observe(DraftStage::kLayerInput, weights_.layers.size(), h));
  DFLASH_RETURN_IF_ERROR(Observe(DraftStage::kOutput, 0, y));
  // Row 0 holds the anchor, which is known: only the rows behind it go through the head.
  MatrixView head_input = y.Rows(1, depth);
  if (count > 1) {
    head_input = head_input_.Rows(count * depth);
    DFLASH_RETURN_IF_ERROR(TakeRows(y, kept, 1, depth, head_input));
  }
  const MatrixView logits = logits_.Rows(count * depth);
  DFLASH_RETURN_IF_ERROR(target->Head(head_input, FasterLinearPhase(head_input.rows), logits));
  last_draft_logits = logits;
  // A row of NaN yields -1, which ends the proposal: a drafter may fail, it must not stop its request.
  return target->ChooseDrafts(logits, options.vocabulary, proposals.tokens, proposals.confidences);
}

// In one copy: the rows of a block lie one after the other.
absl::Status DFlashDrafter::Impl::TakeRows(ConstMatrixView rows, int64_t block, int64_t first, int64_t taken,
                                           MatrixView to) {
  const int64_t blocks = rows.rows / block, cols = rows.cols;
  return CopyRows(ConstMatrixView(rows.Rows(first, 1).data, rows.dtype, blocks, taken * cols, block * cols),
                  MatrixView(to.data, to.dtype, blocks, taken * cols, taken * cols), *stream);
}

absl::Status DFlashDrafter::Impl::Attend(size_t layer, SegmentList segments, MatrixView h) {
  const DFlashLayerWeights& w = weights_.layers[layer];
  const int64_t rows = h.rows;
  const Phase linear_phase = FasterLinearPhase(rows);
  const float eps = this->eps();
  const MatrixView x = normed_.Rows(rows);
  const MatrixView delta = delta_.Rows(rows);
  const MatrixView q = q_.Rows(rows);
  const MatrixView k = kv_.Rows(rows).Cols(0, kv_cols_);
  const MatrixView v = kv_.Rows(rows).Cols(kv_cols_, kv_cols_);
  const MatrixView attended = attended_.Rows(rows);
  if (layer == 0) {
    DFLASH_RETURN_IF_ERROR(RmsNorm(h, w.input_norm.view(), contract.norm_weight, eps, x, *stream));
  } else {
    DFLASH_RETURN_IF_ERROR(AddNorm(h, delta, w.input_norm, x));
  }
  DFLASH_RETURN_IF_ERROR(Observe(DraftStage::kLayerInput, layer, h));
  DFLASH_RETURN_IF_ERROR(Linear(x, w.q, linear_phase, q, *stream));
  DFLASH_RETURN_IF_ERROR(Linear(x, w.kv, linear_phase, kv_.Rows(rows), *stream));
  DFLASH_RETURN_IF_ERROR(NormAndRope(q, w.q_norm.view(), k, w.k_norm.view(), contract.norm_weight, eps, rope_,
                                     segments, *stream));
  DFLASH_RETURN_IF_ERROR(Observe(DraftStage::kQuery, layer, q));
  DFLASH_RETURN_IF_ERROR(Observe(DraftStage::kKey, layer, k));
  DFLASH_RETURN_IF_ERROR(Observe(DraftStage::kValue, layer, v));
  const float scale = 1.0f / std::sqrt(static_cast<float>(config.head_dim));
  DFLASH_RETURN_IF_ERROR(Attention(q, k, v, segments, table->context_starts(), table->page_table(),
                                   Pool(layer), Mask(layer), scale, Phase::kVerify, attended, *stream,
                                   ContextWritten::kBeforeLastNormAndRope));
  return Observe(DraftStage::kAttended, layer, attended);
}

absl::Status DFlashDrafter::Impl::FeedForward(size_t layer, ConstMatrixView attended, MatrixView h) {
  const DFlashLayerWeights& w = weights_.layers[layer];
  const int64_t rows = h.rows;
  const Phase linear_phase = FasterLinearPhase(rows);
  const MatrixView x = normed_.Rows(rows);
  const MatrixView delta = delta_.Rows(rows);
  DFLASH_RETURN_IF_ERROR(Linear(attended, w.out, linear_phase, delta, *stream));
  DFLASH_RETURN_IF_ERROR(AddNorm(h, delta, w.post_attention_norm, x));
  DFLASH_RETURN_IF_ERROR(
      LinearSwiGlu(x, w.gate_up, linear_phase, gate_up_.Rows(rows), activated_.Rows(rows), *stream));
  return Linear(activated_.Rows(rows), w.down, linear_phase, delta, *stream);
}

DFlashDrafter::DFlashDrafter(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
DFlashDrafter::~DFlashDrafter() = default;

absl::StatusOr<std::unique_ptr<DFlashDrafter>> DFlashDrafter::Load(const DraftConfig& config,
                                                                   const DraftCheckpoint& checkpoint,
                                                                   const FeatureContract& contract,
                                                                   const Options& options, Target* target,
                                                                   SequenceTable* table, const Stream& stream,
                                                                   const ReadProgress& progress) {
  DFLASH_ASSIGN_OR_RETURN(std::unique_ptr<Impl> impl,
                          Impl::Load(config, checkpoint, contract, options, target, table, stream, progress));
  return std::unique_ptr<DFlashDrafter>(new DFlashDrafter(std::move(impl)));
}

int64_t DFlashDrafter::max_drafts() const { return impl_->contract.block_size - 1; }

absl::Status DFlashDrafter::Ingest(ConstMatrixView taps, const std::vector<CommittedRows>& rows) {
  return impl_->Ingest(taps, rows);
}

absl::Status DFlashDrafter::IngestVerified(ConstMatrixView taps, SegmentList segments,
                                           const int32_t* row_counts) {
  return impl_->IngestVerified(taps, segments, row_counts);
}

absl::Status DFlashDrafter::Propose(DecodeStates states, const int32_t* slots, int64_t count,
                                    const Proposals& proposals) {
  return impl_->Propose(states, slots, count, proposals);
}

absl::Status DFlashDrafter::ProposeAt(int32_t slot, int32_t anchor, int64_t position) {
  const int64_t slots = impl_->table->slots();
  const Stream& stream = *impl_->stream;
  DecodeState state;
  state.anchor = anchor;
  state.position = static_cast<int32_t>(position);
  state.room = 1;
  DFLASH_ASSIGN_OR_RETURN(const Buffer states, Buffer::Allocate(slots * int64_t{sizeof(state)}, stream));
  DFLASH_ASSIGN_OR_RETURN(const Buffer list, Buffer::Allocate(sizeof(slot), stream));
  DFLASH_ASSIGN_OR_RETURN(const Buffer proposals,
                          Buffer::Allocate(max_drafts() * int64_t{sizeof(int32_t)}, stream));
  DFLASH_RETURN_IF_ERROR(CopyToDevice(states.As<DecodeState>() + slot, &state, sizeof(state), stream));
  DFLASH_RETURN_IF_ERROR(CopyToDevice(list.data(), &slot, sizeof(slot), stream));
  DFLASH_RETURN_IF_ERROR(Propose({.data = states.As<DecodeState>(), .slots = slots}, list.As<int32_t>(), 1,
                                 {.depth = max_drafts(), .tokens = proposals.As<int32_t>()}));
  return stream.Synchronize();  // the buffers go
}

absl::Status DFlashDrafter::Open(int32_t slot, int64_t start) {
  return impl_->table->OpenDraftContext(slot, start);
}

void DFlashDrafter::set_observer(DraftObserver observer) { impl_->observer = std::move(observer); }
ConstMatrixView DFlashDrafter::last_context_features() const { return impl_->last_context_features; }
ConstMatrixView DFlashDrafter::last_draft_logits() const { return impl_->last_draft_logits; }

absl::StatusOr<std::vector<std::vector<float>>> DFlashDrafter::ExportContext(int32_t slot) {
  std::vector<std::vector<float>> stores;
  for (size_t layer = 0; layer < impl_->contract.layers.size(); ++layer) {
    DFLASH_ASSIGN_OR_RETURN(std::vector<std::vector<float>> kv,
                            ExportKeyValue(impl_->Pool(layer), impl_->table->page_table(), slot,
                                           impl_->table->lengths(slot).draft_context_end, *impl_->stream));
    std::move(kv.begin(), kv.end(), std::back_inserter(stores));
  }
  return stores;
}

absl::Status DFlashDrafter::FillPages(const std::vector<int32_t>& pages, float value) {
  for (size_t layer = 0; layer < impl_->contract.layers.size(); ++layer)
    DFLASH_RETURN_IF_ERROR(FillKeyValue(impl_->Pool(layer), pages, value, *impl_->stream));
  return absl::OkStatus();
}

}  // namespace dflash
