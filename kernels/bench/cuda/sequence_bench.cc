// Attention and the recurrence at the 27B's shapes: what depends on the length of sequences and on their
// number.
#include <algorithm>
#include <cstdio>
#include <numeric>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/bench/cuda/bench.h"
#include "kernels/gated_delta_net/gated_delta_net.h"
#include "kernels/rope/rope.h"

namespace dflash::bench {
namespace {

struct AttentionCase {
  const char* name;
  int64_t heads, kv_heads, dim, layers;
  AttentionMask mask;
  Phase phase = Phase::kVerify;
};

// All layers of one model's step, each with pages of its own.
void AttentionStep(const AttentionCase& c, int64_t sequences, int64_t rows, int64_t context,
                   const Stream& stream, const Ceilings& ceilings) {
  const int64_t T = sequences * rows, pages_per_slot = (context + rows + kPageTokens - 1) / kPageTokens;
  KeyValuePool pool = {nullptr, sequences * pages_per_slot, c.kv_heads, c.dim};
  std::vector<Buffer> memory;
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    memory.push_back(Value(Buffer::Allocate(pool.page_count * pool.PageBytes(), stream)));
    Require(FillNormal(memory.back().data(), memory.back().bytes(), 1, static_cast<uint64_t>(layer), stream));
  }
  std::vector<int32_t> order(static_cast<size_t>(pool.page_count));
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = 0; i < order.size(); ++i) std::swap(order[i], order[i * 7919 % order.size()]);
  const Buffer pages = OnDevice(order, stream), segments = EqualSegments(sequences, rows, context, stream);
  const PageTable table = {pages.As<int32_t>(), sequences, pages_per_slot};
  const Matrix q = Noise(T, c.heads * c.dim, stream), k = Noise(T, c.kv_heads * c.dim, stream),
               v = Noise(T, c.kv_heads * c.dim, stream), out = Noise(T, c.heads * c.dim, stream);
  const Matrix norm = Noise(1, c.dim, stream);
  const SegmentList list = {segments.As<Segment>(), sequences};
  // Alone, and where it stands in a step, behind norm and rope.
  const auto time_of = [&](bool with_rope, bool with_attention) {
    return TimeReplays(stream, [&] {
      absl::Status status;
      for (const Buffer& layer : memory) {
        pool.data = layer.data();
        if (with_rope) {
          status.Update(NormAndRope(q.view(), norm.view(), k.view(), norm.view(), NormWeight::kOnePlus, 1e-6f,
                                    {c.dim, 64, 1e7}, list, stream));
        }
        if (!with_attention) continue;
        status.Update(Attention(
            q.view(), k.view(), v.view(), list, nullptr, table, pool, c.mask, 0.0625f, c.phase, out.view(),
            stream, with_rope ? ContextWritten::kBeforeLastNormAndRope : ContextWritten::kAnyTime));
      }
      return status;
    });
  };
  const Microseconds time = time_of(false, true);
  const double in_place = time_of(true, true).median - time_of(true, false).median;
  Record(std::string("attention, ") + c.name + ", " + std::to_string(c.layers) + " layers, " +
             std::to_string(sequences) + " x " + std::to_string(rows) + " rows at " + std::to_string(context),
         time);
  // Of a step: keys that its rows see, on the average over rows.
  const double all = static_cast<double>(context) +
                     (c.mask.causal ? 0.5 * static_cast<double>(rows + 1) : static_cast<double>(rows));
  const double seen = c.mask.window > 0 ? std::min(all, static_cast<double>(c.mask.window)) : all;
  const auto read = static_cast<double>(c.mask.window > 0 ? std::min(context, c.mask.window) : context);
  const double bytes = read * static_cast<double>(sequences * c.layers * c.kv_heads * c.dim * 4);
  const double flop = seen * static_cast<double>(T * c.layers * c.heads * c.dim * 4);
  std::printf(
      "  %-10s %2lld x %4lld rows at %6lld: %9.1f us [%.1f %.1f], %6.2f a layer, %6.2f behind norm and rope, "
      "%5.2f TB/s (%3.0f%% of read), %4.0f TFLOP/s\n",
      c.name, static_cast<long long>(sequences), static_cast<long long>(rows),
      static_cast<long long>(context), time.median, time.low, time.high,
      time.median / static_cast<double>(c.layers), in_place / static_cast<double>(c.layers),
      bytes / time.median * 1e-6, 100 * bytes / time.median * 1e6 / ceilings.read, flop / time.median * 1e-6);
  std::fflush(stdout);
}

void Store(const Stream& stream) {
  constexpr int64_t kLayers = 16;
  KeyValuePool pool = {nullptr, 4, 4, 256};
  const Buffer memory = Value(Buffer::Allocate(4 * pool.PageBytes(), stream));
  pool.data = memory.data();
  const Buffer pages = OnDevice(std::vector<int32_t>{0, 1, 2, 3}, stream);
  const Buffer segments = EqualSegments(1, 16, 100, stream),
               accepted = OnDevice(std::vector<int32_t>{7}, stream);
  const Matrix k = Noise(16, 1024, stream), v = Noise(16, 1024, stream);
  const Microseconds time = TimeReplays(stream, [&] {
    absl::Status status;
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      status.Update(StoreKeyValue(k.view(), v.view(), {segments.As<Segment>(), 1}, accepted.As<int32_t>(),
                                  {pages.As<int32_t>(), 1, 4}, pool, stream));
    }
    return status;
  });
  Record("StoreKeyValue, 16 layers, 16 rows", time);
  std::printf("  StoreKeyValue of 16 layers, 16 rows: %.1f us\n", time.median);
}

constexpr GatedDeltaNetShape kShape = {16, 48, 128, 128};

// The heads of one of so many ranks.
GatedDeltaNetShape OfRank(int64_t ranks) {
  return {kShape.key_heads / ranks, kShape.value_heads / ranks, kShape.key_dim, kShape.value_dim};
}

struct Recurrence {
  Recurrence(const GatedDeltaNetShape& shape, int64_t layers, int64_t sequences, int64_t rows,
             int64_t max_rows, int32_t pending, const Stream& stream)
      : shape(shape),
        qkv(Noise(sequences * rows, shape.QkvCols(), stream)),
        gates(Noise(sequences * rows, 2 * shape.value_heads, stream)),
        o(Noise(sequences * rows, shape.value_heads * shape.value_dim, stream)),
        z(Noise(sequences * rows, shape.value_heads * shape.value_dim, stream)),
        convolved(Noise(sequences * rows, shape.QkvCols(), stream)),
        conv_weight(Noise(shape.QkvCols(), 4, stream)),
        conv_state(Noise(3 * sequences, shape.QkvCols(), stream)),
        norm_weight(Noise(1, shape.value_dim, stream)),
        per_head(OnDevice(std::vector<float>(static_cast<size_t>(shape.value_heads), -1.0f), stream)),
        segments(EqualSegments(sequences, rows, 128, stream)),
        buffer(OnDevice(std::vector<int32_t>(static_cast<size_t>(sequences), 0), stream)),
        count(OnDevice(std::vector<int32_t>(static_cast<size_t>(sequences), pending), stream)) {
    for (int64_t layer = 0; layer < layers; ++layer) {
      states.push_back(Value(Buffer::Allocate(sequences * shape.StateFloats() * 4, stream)));
      records.push_back(Value(Buffer::Allocate(sequences * 2 * max_rows * shape.RecordFloats() * 4, stream)));
      state.push_back({states.back().As<float>(), records.back().As<float>(), sequences, max_rows});
    }
    input = {qkv.view(), gates.view().Cols(0, shape.value_heads),
             gates.view().Cols(shape.value_heads, shape.value_heads), per_head.As<float>(),
             per_head.As<float>()};
    list = {segments.As<Segment>(), sequences};
    around = {conv_weight.view(),    {conv_state.view().data, sequences, 4, shape.QkvCols()},
              norm_weight.view(),    z.view(),
              GateActivation::kSilu, 1e-6f};
    pending_records = {buffer.As<int32_t>(), count.As<int32_t>()};
  }
  GatedDeltaNetShape shape;
  Matrix qkv, gates, o, z, convolved, conv_weight, conv_state, norm_weight;
  Buffer per_head, segments, buffer, count;
  std::vector<Buffer> states, records;
  std::vector<GatedDeltaNetState> state;
  GatedDeltaNetInput input;
  GatedDeltaNetSurroundings around;
  SegmentList list;
  PendingRecords pending_records;
};

void DeltaVerify(int64_t ranks, int64_t sequences, int64_t rows, int32_t pending, const Stream& stream,
                 const Ceilings& ceilings) {
  constexpr int64_t kLayers = 48;
  const GatedDeltaNetShape shape = OfRank(ranks);
  const Recurrence r(shape, kLayers, sequences, rows, 16, pending, stream);
  const Microseconds time = TimeReplays(stream, [&] {
    absl::Status status;
    for (const GatedDeltaNetState& state : r.state) {
      status.Update(GatedDeltaNetMixerVerify(shape, r.input, r.around, r.list, r.pending_records, state,
                                             r.convolved.view(), r.o.view(), stream));
    }
    return status;
  });
  Record("Gated DeltaNet, verify, 48 layers, " + std::to_string(sequences) + " x " + std::to_string(rows) +
             " rows, " + std::to_string(pending) + " to fold" +
             (ranks == 1 ? "" : ", one of " + std::to_string(ranks) + " ranks"),
         time);
  const double bytes =
      static_cast<double>(kLayers * sequences * shape.StateFloats() * 4) * (pending > 0 ? 2 : 1);
  std::printf(
      "  verify %2lld heads, %2lld x %2lld rows, %2d to fold: %8.1f us [%.1f %.1f] of 48 layers, %5.2f a "
      "layer, %5.2f TB/s"
      " (%3.0f%% of copy)\n",
      static_cast<long long>(shape.value_heads), static_cast<long long>(sequences),
      static_cast<long long>(rows), pending, time.median, time.low, time.high, time.median / kLayers,
      bytes / time.median * 1e-6, 100 * bytes / time.median * 1e6 / ceilings.copy);
  std::fflush(stdout);
}

void DeltaPrefill(int64_t sequences, int64_t rows, const Stream& stream) {
  constexpr int64_t kLayers = 6;
  const Recurrence r(kShape, kLayers, sequences, rows, 1, 0, stream);
  const Microseconds time = TimeReplays(stream, [&] {
    absl::Status status;
    for (const GatedDeltaNetState& state : r.state) {
      status.Update(GatedDeltaNetPrefill(kShape, r.input, r.list, state, r.o.view(), stream));
    }
    return status;
  });
  Record("Gated DeltaNet, prefill, a layer, " + std::to_string(sequences) + " x " + std::to_string(rows) +
             " rows",
         time, kLayers);
  std::printf("  prefill %lld x %5lld rows: %8.1f us a layer [%.1f %.1f]\n",
              static_cast<long long>(sequences), static_cast<long long>(rows), time.median / kLayers,
              time.low / kLayers, time.high / kLayers);
  std::fflush(stdout);
}

}  // namespace

void RunSequences(const Stream& stream, const Ceilings& ceilings) {
  std::printf("\nattention of all layers (target 16 layers, drafter 4):\n");
  const AttentionCase target = {"target", 24, 4, 256, 16, {}};
  for (int64_t context : {1024, 8192, 32768}) {
    for (int64_t rows : {1, 16}) AttentionStep(target, 1, rows, context, stream, ceilings);
  }
  AttentionStep(target, 8, 16, 1024, stream, ceilings);
  AttentionStep(target, 8, 16, 8192, stream, ceilings);
  AttentionStep(target, 16, 8, 1024, stream, ceilings);
  AttentionStep(target, 1, 64, 1024, stream, ceilings);
  const AttentionCase of_two = {"of 2 ranks", 12, 2, 256, 16, {}};
  for (int64_t rows : {1, 16}) AttentionStep(of_two, 1, rows, 1024, stream, ceilings);
  AttentionStep(of_two, 8, 16, 1024, stream, ceilings);
  AttentionStep({"draft win", 32, 8, 128, 4, {true, 2048}}, 1, 16, 8192, stream, ceilings);
  for (int64_t context : {1024, 32768}) {
    AttentionStep({"draft full", 32, 8, 128, 4, {false, 0}}, 1, 16, context, stream, ceilings);
  }
  const AttentionCase prefill = {"prefill", 24, 4, 256, 2, {}, Phase::kPrefill};
  for (auto [rows, context] :
       {std::pair<int64_t, int64_t>{512, 0}, {2048, 0}, {8192, 0}, {2048, 6144}, {512, 32768}}) {
    AttentionStep(prefill, 1, rows, context, stream, ceilings);
  }
  Store(stream);
  std::printf("\nGated DeltaNet:\n");
  for (int32_t pending : {0, 7, 16}) {
    for (int64_t rows : {1, 4, 8, 16}) DeltaVerify(1, 1, rows, pending, stream, ceilings);
  }
  for (int64_t ranks : {2, 4, 8}) {
    for (int64_t rows : {1, 16}) DeltaVerify(ranks, 1, rows, 7, stream, ceilings);
  }
  for (auto [sequences, rows] : {std::pair<int64_t, int64_t>{2, 16}, {4, 16}, {8, 16}, {16, 8}, {32, 16}}) {
    DeltaVerify(1, sequences, rows, 7, stream, ceilings);
  }
  for (int64_t rows : {64, 512, 2048, 8192}) DeltaPrefill(1, rows, stream);
  DeltaPrefill(8, 1024, stream);
}

}  // namespace dflash::bench
