// The linear layers of a pair of models: each shape alone, and all of a step in order.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/device/stream.h"
#include "tools/dflash_bench/report.h"
#include "worker/model/draft_config.h"
#include "worker/model/target_config.h"

namespace dflash::bench {

struct LayerShape {
  std::string name;
  int64_t out_features = 0;
  int64_t in_features = 0;
  int64_t count = 0;  // in one pass

  int64_t weights() const { return out_features * in_features; }
};

// Every stacked projection of one forward pass, lm_head last.
std::vector<LayerShape> TargetShapes(const TargetConfig& config);
// Of the block pass, without the target's lm_head, which it uses.
std::vector<LayerShape> BlockPassShapes(const DraftConfig& config);
// Of the ingestion of committed rows.
std::vector<LayerShape> IngestionShapes(const DraftConfig& config);

// A call of a linear layer in a step.
struct LayerCall {
  LayerShape shape;
  int64_t rows = 0;
};
// Of a round: block pass, verification of a whole block, ingestion of `committed` rows.
std::vector<LayerCall> RoundCalls(const TargetConfig& target, const DraftConfig& draft, int64_t committed);

// The calls with random weights, bfloat16 in the backend's layout and float32 for sgemm, each layer with
// weights of its own, as in a model.
class LayerStack {
 public:
  LayerStack(const std::vector<LayerCall>& calls, const Stream& stream);
  ~LayerStack();
  LayerStack(LayerStack&&) noexcept;

  void RunLinear() const;       // all calls, by the backend
  void RunSgemm() const;        // the same by the library
  double weight_bytes() const;  // bfloat16
  double operations() const;    // multiply and add counted apart
  int64_t calls() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Tables for 1 and for `block` rows with this stream's threads: each shape, then all of them in order.
void MeasureLinearLayers(const TargetConfig& target, const DraftConfig* draft, int64_t block, int repeats,
                         const Stream& stream, Report& report);

}  // namespace dflash::bench
