#include "tools/dflash_bench/operations.h"

#include <cmath>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "kernels/attention/attention.h"
#include "kernels/causal_conv/causal_conv.h"
#include "kernels/device/buffer.h"
#include "kernels/device/cpu/thread_pool.h"
#include "kernels/embedding/embedding.h"
#include "kernels/gated_delta_net/gated_delta_net.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/rope/rope.h"
#include "kernels/sampling/draft_choice.h"
#include "kernels/sampling/sampling.h"
#include "kernels/swiglu/swiglu.h"
#include "tools/dflash_bench/timing.h"

namespace dflash::bench {
namespace {

class OperationBench {
 public:
  OperationBench(const TargetConfig& target, const DraftConfig* draft, int64_t context, int64_t block,
                 int repeats, const Stream& stream, Report& report)
      : target_(target),
        draft_(draft),
        context_(context),
        block_(block),
        repeats_(repeats),
        stream_(stream),
        report_(report) {}

  void Run() {
    report_.Section(absl::StrCat("other operations, ", ThreadsOf(stream_).threads(), " threads, context of ",
                                 context_, " tokens: us per call"));
    Norms();
    Gates();
    AttentionOfTarget();
    if (draft_ != nullptr) AttentionOfDrafter();
    LinearAttention();
    Vocabulary();
  }

 private:
  Matrix RandomMatrix(int64_t rows, int64_t cols, float scale = 1) {
    absl::StatusOr<Matrix> matrix = Matrix::Allocate(rows, cols, DType::kF32, stream_);
    DFLASH_CHECK(matrix.ok());
    for (int64_t i = 0; i < rows * cols; ++i) {
      matrix->view().Row<float>(0)[i] = scale * (static_cast<float>(generator_() >> 8) * 0x1p-23f - 1.0f);
    }
    return *std::move(matrix);
  }
  template <typename T>
  Buffer Uploaded(const std::vector<T>& values) {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
    absl::StatusOr<Buffer> buffer = Buffer::Allocate(bytes, stream_);
    DFLASH_CHECK(buffer.ok());
    DFLASH_CHECK(CopyToDevice(buffer->data(), values.data(), bytes, stream_).ok());
    return *std::move(buffer);
  }

  // One row of the table: the operation for 1 row and for a block of rows.
  void Measure(const std::string& name, const std::function<absl::Status(int64_t rows)>& operation) {
    Row row = {name, {}};
    for (const int64_t rows : {int64_t{1}, block_}) {
      const double seconds = TimeMedian([&] { DFLASH_CHECK(operation(rows).ok()); }, 1, repeats_);
      row.figures.push_back({absl::StrCat(rows, rows == 1 ? " row" : " rows"), seconds * 1e6});
    }
    report_.Add(std::move(row));
  }

  SegmentList Segments(int64_t rows, int64_t position) {
    Buffer& buffer = segments_[{rows, position}];
    if (buffer.data() == nullptr) {
      buffer = Uploaded<Segment>({{.slot = 0,
                                   .first_row = 0,
                                   .row_count = static_cast<int32_t>(rows),
                                   .start_position = static_cast<int32_t>(position)}});
    }
    return {.data = buffer.As<Segment>(), .count = 1};
  }

  void Norms() {
    const int64_t hidden = target_.hidden_size;
    const Matrix h = RandomMatrix(block_, hidden), delta = RandomMatrix(block_, hidden, 1e-6f);
    const Matrix w = RandomMatrix(1, hidden), y = RandomMatrix(block_, hidden);
    Measure("add and norm, hidden state", [&](int64_t rows) {
      return AddRmsNorm(h.Rows(rows), delta.Rows(rows), w.view(), NormWeight::kOnePlus, 1e-6f, y.Rows(rows),
                        stream_);
    });
    const int64_t heads = target_.num_attention_heads, dim = target_.head_dim;
    const Matrix q = RandomMatrix(block_, heads * dim), head_weight = RandomMatrix(1, dim),
                 normed = RandomMatrix(block_, heads * dim);
    Measure("norm of query heads", [&](int64_t rows) {
      return RmsNorm(q.Rows(rows), head_weight.view(), NormWeight::kOnePlus, 1e-6f, normed.Rows(rows),
                     stream_);
    });
    const int64_t value_dim = target_.linear_value_head_dim;
    const Matrix out = RandomMatrix(block_, target_.linear_value_size()),
                 z = RandomMatrix(block_, target_.linear_value_size()),
                 value_weight = RandomMatrix(1, value_dim),
                 gated = RandomMatrix(block_, target_.linear_value_size());
    Measure("gated norm", [&](int64_t rows) {
      return GatedRmsNorm(out.Rows(rows), value_weight.view(), z.Rows(rows), target_.gate_activation, 1e-6f,
                          gated.Rows(rows), stream_);
    });
  }

  void Gates() {
    const Matrix gate_up = RandomMatrix(block_, 2 * target_.intermediate_size),
                 y = RandomMatrix(block_, target_.intermediate_size);
    Measure("swiglu", [&](int64_t rows) { return SwiGlu(gate_up.Rows(rows), y.Rows(rows), stream_); });
    const int64_t query = target_.num_attention_heads * target_.head_dim;
    // In place: gates so wide open that x stays what it is, call after call.
    const Matrix gate = RandomMatrix(block_, query), x = RandomMatrix(block_, query);
    for (int64_t i = 0; i < block_ * query; ++i) gate.view().Row<float>(0)[i] += 30;
    Measure("sigmoid gate",
            [&](int64_t rows) { return SigmoidGate(x.Rows(rows), gate.Rows(rows), stream_); });
  }

  // The attention of one layer over pages that hold `context_` tokens.
  void AttentionLayer(const std::string& what, int64_t heads, int64_t kv_heads, int64_t head_dim,
                      const RopeShape& rope, const AttentionMask& mask) {
    const int64_t pages = (context_ + block_ + kPageTokens - 1) / kPageTokens;
    std::vector<int32_t> table(static_cast<size_t>(pages));
    for (int64_t i = 0; i < pages; ++i) table[static_cast<size_t>(i)] = static_cast<int32_t>(i);
    const Buffer device_table = Uploaded(table);
    const PageTable page_table = {.pages = device_table.As<int32_t>(), .slots = 1, .pages_per_slot = pages};
    KeyValuePool pool = {.data = nullptr, .page_count = pages, .kv_heads = kv_heads, .head_dim = head_dim};
    absl::StatusOr<Buffer> memory = Buffer::Allocate(pages * pool.PageBytes(), stream_);
    DFLASH_CHECK(memory.ok());
    pool.data = memory->data();
    const Matrix context_k = RandomMatrix(context_, kv_heads * head_dim),
                 context_v = RandomMatrix(context_, kv_heads * head_dim);
    DFLASH_CHECK(StoreKeyValue(context_k.view(), context_v.view(), Segments(context_, 0), nullptr, page_table,
                               pool, stream_)
                     .ok());
    const Matrix q = RandomMatrix(block_, heads * head_dim), out = RandomMatrix(block_, heads * head_dim);
    const Matrix k = RandomMatrix(block_, kv_heads * head_dim), v = RandomMatrix(block_, kv_heads * head_dim);
    const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
    Measure(absl::StrCat("attention, ", what), [&](int64_t rows) {
      return Attention(q.Rows(rows), k.Rows(rows), v.Rows(rows), Segments(rows, context_), nullptr,
                       page_table, pool, mask, scale, Phase::kVerify, out.Rows(rows), stream_);
    });
    Measure(absl::StrCat("rope of queries, ", what),
            [&](int64_t rows) { return ApplyRope(q.Rows(rows), rope, Segments(rows, context_), stream_); });
    Measure(absl::StrCat("store keys and values, ", what), [&](int64_t rows) {
      return StoreKeyValue(k.Rows(rows), v.Rows(rows), Segments(rows, context_), nullptr, page_table, pool,
                           stream_);
    });
  }

  void AttentionOfTarget() {
    AttentionLayer(
        "target", target_.num_attention_heads, target_.num_key_value_heads, target_.head_dim,
        {.head_dim = target_.head_dim, .rotary_dim = target_.rotary_dim, .theta = target_.rope_theta}, {});
  }

  void AttentionOfDrafter() {
    const RopeShape rope = {
        .head_dim = draft_->head_dim, .rotary_dim = draft_->head_dim, .theta = draft_->rope_theta};
    std::map<DraftLayerKind, bool> seen;
    for (const DraftLayerMask& mask : draft_->layers) {
      if (std::exchange(seen[mask.kind], true)) continue;
      AttentionLayer(mask.kind == DraftLayerKind::kSliding ? "drafter, sliding" : "drafter, full",
                     draft_->num_attention_heads, draft_->num_key_value_heads, draft_->head_dim, rope,
                     {.causal = mask.causal, .window = mask.window});
    }
  }

  void LinearAttention() {
    const GatedDeltaNetShape shape = {.key_heads = target_.linear_key_heads,
                                      .value_heads = target_.linear_value_heads,
                                      .key_dim = target_.linear_key_head_dim,
                                      .value_dim = target_.linear_value_head_dim};
    const int64_t rows = std::max(block_, kPageTokens), channels = shape.QkvCols();
    ConvState conv = {.data = nullptr, .slots = 1, .taps = target_.conv_kernel, .channels = channels};
    absl::StatusOr<Buffer> conv_memory = Buffer::Allocate(conv.Bytes(), stream_);
    DFLASH_CHECK(conv_memory.ok());
    conv.data = conv_memory->data();
    const Matrix x = RandomMatrix(rows, channels), w = RandomMatrix(channels, conv.taps),
                 y = RandomMatrix(rows, channels);
    Measure("convolution", [&](int64_t n) {
      return CausalConv(x.Rows(n), w.view(), Segments(n, 0), conv, y.Rows(n), stream_);
    });
    const Matrix gates = RandomMatrix(rows, 2 * shape.value_heads),
                 a_log = RandomMatrix(1, shape.value_heads), dt_bias = RandomMatrix(1, shape.value_heads),
                 out = RandomMatrix(rows, target_.linear_value_size());
    absl::StatusOr<Buffer> states = Buffer::Allocate(shape.StateFloats() * 4, stream_);
    absl::StatusOr<Buffer> records = Buffer::Allocate(2 * block_ * shape.RecordFloats() * 4, stream_);
    DFLASH_CHECK(states.ok() && records.ok());
    const GatedDeltaNetState state = {
        .states = states->As<float>(), .records = records->As<float>(), .slots = 1, .max_rows = block_};
    const auto input = [&](int64_t n) {
      return GatedDeltaNetInput{.qkv = y.Rows(n),
                                .beta = gates.Rows(n).Cols(0, shape.value_heads),
                                .decay = gates.Rows(n).Cols(shape.value_heads, shape.value_heads),
                                .a_log = a_log.view().Row<float>(0),
                                .dt_bias = dt_bias.view().Row<float>(0)};
    };
    const Buffer buffer_of = Uploaded<int32_t>({0});
    Measure("gated deltanet verify", [&](int64_t n) {
      const auto pending = static_cast<int32_t>(n == 1 ? 1 : n / 2);  // accepted in the round before
      const Buffer count = Uploaded<int32_t>({pending});
      return GatedDeltaNetVerify(shape, input(n), Segments(n, 0),
                                 {.buffer = buffer_of.As<int32_t>(), .count = count.As<int32_t>()}, state,
                                 out.Rows(n), stream_);
    });
    const double seconds = TimeMedian(
        [&] {
          DFLASH_CHECK(GatedDeltaNetPrefill(shape, input(kPageTokens), Segments(kPageTokens, 0), state,
                                            out.Rows(kPageTokens), stream_)
                           .ok());
        },
        1, repeats_);
    report_.Add({"gated deltanet prefill", {{absl::StrCat(kPageTokens, " rows"), seconds * 1e6}}});
  }

  void Vocabulary() {
    const int64_t vocabulary = target_.vocab_size;
    const Matrix table = RandomMatrix(vocabulary, target_.hidden_size),
                 y = RandomMatrix(block_, target_.hidden_size);
    std::vector<int32_t> ids(static_cast<size_t>(block_), 17);
    const Buffer device_ids = Uploaded(ids);
    Measure("embedding", [&](int64_t rows) {
      return EmbedRows(device_ids.As<int32_t>(), table.view(), y.Rows(rows), stream_);
    });
    const Matrix logits = RandomMatrix(block_, vocabulary, 10);
    const Buffer tokens = Uploaded(ids);
    const Buffer candidates = Uploaded(std::vector<DraftCandidate>(ids.size()));
    const Buffer confidences = Uploaded(std::vector<float>(ids.size()));
    Measure("draft choice", [&](int64_t rows) -> absl::Status {
      DFLASH_RETURN_IF_ERROR(
          ListDrafts(logits.Rows(rows), 0, vocabulary, candidates.As<DraftCandidate>(), stream_));
      return ChooseDrafts(candidates.As<DraftCandidate>(), 1, rows, tokens.As<int32_t>(),
                          confidences.As<float>(), stream_);
    });
    const Buffer positions = Uploaded(std::vector<int64_t>(ids.size(), 100));
    const auto sample = [&](const std::string& name, const SamplingParams& params) {
      const Buffer device_params = Uploaded(std::vector<SamplingParams>(ids.size(), params));
      Measure(name, [&](int64_t rows) {
        return SampleRows(logits.Rows(rows), device_params.As<SamplingParams>(), positions.As<int64_t>(),
                          vocabulary, tokens.As<int32_t>(), stream_);
      });
    };
    sample("sampling, temperature", {.temperature = 1, .seed = 1});
    sample("sampling, top-k 20, top-p 0.9", {.temperature = 1, .top_k = 20, .top_p = 0.9f, .seed = 1});
    sample("sampling, top-p 0.9", {.temperature = 1, .top_p = 0.9f, .seed = 1});
  }

  const TargetConfig& target_;
  const DraftConfig* const draft_;
  const int64_t context_, block_;
  const int repeats_;
  const Stream& stream_;
  Report& report_;
  std::mt19937 generator_{1};
  std::map<std::pair<int64_t, int64_t>, Buffer> segments_;
};

}  // namespace

void MeasureOperations(const TargetConfig& target, const DraftConfig* draft, int64_t context, int64_t block,
                       int repeats, const Stream& stream, Report& report) {
  OperationBench(target, draft, context, block, repeats, stream, report).Run();
}

}  // namespace dflash::bench
