#include "tools/dflash_bench/linear_layers.h"

#include <algorithm>
#include <memory>
#include <random>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "kernels/device/cpu/thread_pool.h"
#include "kernels/linear/linear.h"
#include "tools/dflash_bench/ceilings.h"
#include "tools/dflash_bench/sgemm.h"
#include "tools/dflash_bench/timing.h"

namespace dflash::bench {
namespace {

// Enough copies of one shape that its weights come from where a whole model's come from.
constexpr int64_t kLeastWeightBytes = 12 << 20;

template <typename T>
std::vector<T> RandomValues(int64_t count, uint32_t seed) {
  std::vector<T> values(static_cast<size_t>(count));
  std::mt19937 generator(seed);
  for (T& value : values) value = T(static_cast<float>(generator() >> 8) * 0x1p-23f - 1.0f);
  return values;
}

}  // namespace

std::vector<LayerShape> TargetShapes(const TargetConfig& c) {
  int64_t full = 0;
  for (TargetLayerKind kind : c.layers) full += kind == TargetLayerKind::kFullAttention;
  const int64_t linear = c.num_layers() - full, hidden = c.hidden_size;
  const int64_t query = c.num_attention_heads * c.head_dim, kv = c.num_key_value_heads * c.head_dim;
  return {{"gated deltanet in", c.linear_qkv_size() + c.linear_value_size() + 2 * c.linear_value_heads,
           hidden, linear},
          {"gated deltanet out", hidden, c.linear_value_size(), linear},
          {"attention in", 2 * query + 2 * kv, hidden, full},
          {"attention out", hidden, query, full},
          {"gate up", 2 * c.intermediate_size, hidden, full + linear},
          {"down", hidden, c.intermediate_size, full + linear},
          {"lm_head", c.vocab_size, hidden, 1}};
}

std::vector<LayerShape> BlockPassShapes(const DraftConfig& c) {
  const int64_t query = c.num_attention_heads * c.head_dim, kv = c.num_key_value_heads * c.head_dim;
  return {{"drafter q", query, c.hidden_size, c.num_layers()},
          {"drafter kv", 2 * kv, c.hidden_size, c.num_layers()},
          {"drafter out", c.hidden_size, query, c.num_layers()},
          {"drafter gate up", 2 * c.intermediate_size, c.hidden_size, c.num_layers()},
          {"drafter down", c.hidden_size, c.intermediate_size, c.num_layers()}};
}

std::vector<LayerShape> IngestionShapes(const DraftConfig& c) {
  const int64_t kv = c.num_key_value_heads * c.head_dim;
  return {{"drafter fc", c.hidden_size, c.num_taps() * c.hidden_size, 1},
          {"drafter context kv", 2 * kv, c.hidden_size, c.num_layers()}};
}

std::vector<LayerCall> RoundCalls(const TargetConfig& target, const DraftConfig& draft, int64_t committed) {
  std::vector<LayerCall> calls;
  const std::vector<LayerShape> verified = TargetShapes(target);
  for (const LayerShape& shape : BlockPassShapes(draft)) calls.push_back({shape, draft.block_size});
  calls.push_back({verified.back(), draft.block_size - 1});  // the anchor needs no draft
  for (const LayerShape& shape : verified) calls.push_back({shape, draft.block_size});
  for (const LayerShape& shape : IngestionShapes(draft)) calls.push_back({shape, committed});
  return calls;
}

struct LayerStack::Impl {
  struct Layer {
    int64_t rows;
    LinearWeight weight;
    std::vector<float> plain;
  };
  const Stream* stream;
  std::vector<Layer> layers;
  std::vector<float> x, y;
};

LayerStack::LayerStack(const std::vector<LayerCall>& calls, const Stream& stream)
    : impl_(std::make_unique<Impl>()) {
  impl_->stream = &stream;
  int64_t most_inputs = 0, most_outputs = 0;
  uint32_t seed = 1;
  for (const LayerCall& call : calls) {
    const LayerShape& shape = call.shape;
    most_inputs = std::max(most_inputs, call.rows * shape.in_features);
    most_outputs = std::max(most_outputs, call.rows * shape.out_features);
    for (int64_t i = 0; i < shape.count; ++i) {
      const std::vector<bf16> values = RandomValues<bf16>(shape.weights(), seed++);
      auto weight =
          LinearWeight::Pack({ConstMatrixView(values.data(), shape.out_features, shape.in_features)}, stream);
      DFLASH_CHECK(weight.ok());
      impl_->layers.push_back({call.rows, *std::move(weight), {}});
      if (SgemmLibrary().empty()) continue;
      for (bf16 value : values) impl_->layers.back().plain.push_back(static_cast<float>(value));
    }
  }
  impl_->x = RandomValues<float>(most_inputs, 0);
  impl_->y.resize(static_cast<size_t>(most_outputs));
}

LayerStack::~LayerStack() = default;
LayerStack::LayerStack(LayerStack&&) noexcept = default;

void LayerStack::RunLinear() const {
  for (const Impl::Layer& layer : impl_->layers) {
    const LinearWeight& w = layer.weight;
    const ConstMatrixView x(impl_->x.data(), layer.rows, w.in_features());
    DFLASH_CHECK(Linear(x, w, Phase::kVerify, MatrixView(impl_->y.data(), layer.rows, w.out_features()),
                        *impl_->stream)
                     .ok());
  }
}

void LayerStack::RunSgemm() const {
  for (const Impl::Layer& layer : impl_->layers) {
    Sgemm(impl_->x.data(), layer.plain.data(), layer.rows, layer.weight.out_features(),
          layer.weight.in_features(), impl_->y.data());
  }
}

double LayerStack::weight_bytes() const {
  double bytes = 0;
  for (const Impl::Layer& layer : impl_->layers) {
    bytes += 2.0 * static_cast<double>(layer.weight.out_features() * layer.weight.in_features());
  }
  return bytes;
}

double LayerStack::operations() const {
  double operations = 0;
  for (const Impl::Layer& layer : impl_->layers) {
    operations +=
        2.0 * static_cast<double>(layer.rows * layer.weight.out_features() * layer.weight.in_features());
  }
  return operations;
}

int64_t LayerStack::calls() const { return static_cast<int64_t>(impl_->layers.size()); }

namespace {

// In turns with reading as many bytes, in one loop and in loops of a layer each.
void MeasureOneRow(const std::string& name, const LayerStack& stack, const Stream& stream, int repeats,
                   Report& report) {
  const auto bytes = static_cast<int64_t>(stack.weight_bytes());
  const Reading whole(bytes, bytes, stream), in_loops(bytes, bytes / stack.calls(), stream);
  const std::vector<Timing> timings = TimeInTurn({{[&] { stack.RunLinear(); }, stack.weight_bytes(), [] {}},
                                                  {[&] { whole.Run(); }, whole.bytes(), [] {}},
                                                  {[&] { in_loops.Run(); }, in_loops.bytes(), [] {}}},
                                                 repeats);
  const double seconds = timings[0].median();  // a byte
  report.Add({name,
              {{"us", seconds * stack.weight_bytes() / static_cast<double>(stack.calls()) * 1e6},
               {"GB/s", 1e-9 / seconds},
               {"% of read", 100 * MedianRatio(timings[1], timings[0])},
               {"% in loops", 100 * MedianRatio(timings[2], timings[0])}}});
}

void MeasureBlock(const std::string& name, const LayerStack& stack, double peak, int repeats,
                  Report& report) {
  const auto calls = static_cast<double>(stack.calls());
  std::vector<Pass> passes = {{[&] { stack.RunLinear(); }, calls, [] {}}};
  if (!SgemmLibrary().empty()) passes.push_back({[&] { stack.RunSgemm(); }, calls, SettleSgemm});
  const std::vector<Timing> timings = TimeInTurn(passes, repeats);
  const double operations = stack.operations() / calls, rate = operations / timings[0].median();
  Row row = {name,
             {{"us", timings[0].median() * 1e6}, {"GFLOP/s", rate * 1e-9}, {"% of peak", 100 * rate / peak}}};
  if (passes.size() > 1) {
    row.figures.push_back({"sgemm us", timings[1].median() * 1e6});
    row.figures.push_back({"% of sgemm", 100 * MedianRatio(timings[1], timings[0])});
  }
  report.Add(std::move(row));
}

}  // namespace

void MeasureLinearLayers(const TargetConfig& target, const DraftConfig* draft, int64_t block, int repeats,
                         const Stream& stream, Report& report) {
  const int threads = ThreadsOf(stream).threads();
  SetSgemmThreads(threads);
  std::vector<LayerShape> shapes = TargetShapes(target);
  if (draft != nullptr) {
    for (const LayerShape& shape : BlockPassShapes(*draft)) shapes.push_back(shape);
    for (const LayerShape& shape : IngestionShapes(*draft)) shapes.push_back(shape);
  }
  const auto with_rows = [](const std::vector<LayerShape>& shapes, int64_t rows) {
    std::vector<LayerCall> calls;
    for (const LayerShape& shape : shapes) calls.push_back({shape, rows});
    return calls;
  };
  // One shape in so many copies that its weights are not in the first-level caches again.
  const auto copies = [](LayerShape shape) {
    shape.count = std::max<int64_t>(1, kLeastWeightBytes / (2 * shape.weights()));
    return shape;
  };
  for (const int64_t rows : {int64_t{1}, block}) {
    const double peak = rows == 1 ? 0 : MultiplyAddRate(stream, repeats);
    report.Section(absl::StrCat("linear layers, ", rows, rows == 1 ? " row, " : " rows, ", threads,
                                threads == 1 ? " thread" : " threads"));
    const auto measure = [&](const std::string& name, const std::vector<LayerCall>& calls) {
      const LayerStack stack(calls, stream);
      if (rows == 1) {
        MeasureOneRow(name, stack, stream, repeats, report);
      } else {
        MeasureBlock(name, stack, peak, repeats, report);
      }
    };
    for (const LayerShape& shape : shapes) {
      measure(absl::StrCat(shape.name, " ", shape.out_features, "x", shape.in_features),
              {{copies(shape), rows}});
    }
    measure("whole target, per layer", with_rows(TargetShapes(target), rows));
  }
}

}  // namespace dflash::bench
