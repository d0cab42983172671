// The lists of tensors that belong to a configuration.
#include "worker/model/checkpoint.h"

namespace dflash {
namespace {

class Lister {
 public:
  void Add(const std::string& name, std::vector<ExpectedSize> shape) {
    tensors_.push_back({prefix_ + name, std::move(shape)});
  }
  void SetPrefix(std::string prefix) { prefix_ = std::move(prefix); }
  std::vector<ExpectedTensor> Take() { return std::move(tensors_); }

  // What every decoder layer here has.
  void AddMlpAndNorms(const ExpectedSize& hidden, const ExpectedSize& intermediate) {
    Add("input_layernorm.weight", {hidden});
    Add("post_attention_layernorm.weight", {hidden});
    Add("mlp.gate_proj.weight", {intermediate, hidden});
    Add("mlp.up_proj.weight", {intermediate, hidden});
    Add("mlp.down_proj.weight", {hidden, intermediate});
  }
  // `q_out` rows of q_proj; `heads` columns of o_proj.
  void AddAttention(const ExpectedSize& hidden, const ExpectedSize& q_out, const ExpectedSize& heads,
                    const ExpectedSize& kv_heads, const ExpectedSize& head_dim) {
    Add("self_attn.q_proj.weight", {q_out, hidden});
    Add("self_attn.k_proj.weight", {kv_heads, hidden});
    Add("self_attn.v_proj.weight", {kv_heads, hidden});
    Add("self_attn.o_proj.weight", {hidden, heads});
    Add("self_attn.q_norm.weight", {head_dim});
    Add("self_attn.k_norm.weight", {head_dim});
  }

 private:
  std::string prefix_;
  std::vector<ExpectedTensor> tensors_;
};

std::string LayerPrefix(int64_t layer) { return "layers." + std::to_string(layer) + "."; }

}  // namespace

std::vector<ExpectedTensor> ExpectedTensors(const TargetConfig& config) {
  const ExpectedSize hidden = {config.hidden_size, "hidden_size"};
  const ExpectedSize vocabulary = {config.vocab_size, "vocab_size"};
  const ExpectedSize intermediate = {config.intermediate_size, "intermediate_size"};
  const ExpectedSize head_dim = {config.head_dim, "head_dim"};
  const ExpectedSize heads = {config.num_attention_heads * config.head_dim, "num_attention_heads * head_dim"};
  const ExpectedSize q_and_gate = {2 * heads.size, "2 * num_attention_heads * head_dim"};
  const ExpectedSize kv_heads = {config.num_key_value_heads * config.head_dim,
                                 "num_key_value_heads * head_dim"};
  const ExpectedSize qkv = {config.linear_qkv_size(),
                            "2 * linear_num_key_heads * linear_key_head_dim + "
                            "linear_num_value_heads * linear_value_head_dim"};
  const ExpectedSize values = {config.linear_value_size(), "linear_num_value_heads * linear_value_head_dim"};
  const ExpectedSize value_heads = {config.linear_value_heads, "linear_num_value_heads"};

  Lister list;
  list.Add("embed_tokens.weight", {vocabulary, hidden});
  for (int64_t i = 0; i < config.num_layers(); ++i) {
    list.SetPrefix(LayerPrefix(i));
    list.AddMlpAndNorms(hidden, intermediate);
    switch (config.layers[i]) {
      case TargetLayerKind::kFullAttention:
        list.AddAttention(hidden, q_and_gate, heads, kv_heads, head_dim);
        break;
      case TargetLayerKind::kLinearAttention:
        list.Add("linear_attn.in_proj_qkv.weight", {qkv, hidden});
        list.Add("linear_attn.in_proj_z.weight", {values, hidden});
        list.Add("linear_attn.in_proj_b.weight", {value_heads, hidden});
        list.Add("linear_attn.in_proj_a.weight", {value_heads, hidden});
        list.Add("linear_attn.conv1d.weight",
                 {qkv, {1, "one input channel"}, {config.conv_kernel, "linear_conv_kernel_dim"}});
        list.Add("linear_attn.A_log", {value_heads});
        list.Add("linear_attn.dt_bias", {value_heads});
        list.Add("linear_attn.norm.weight", {{config.linear_value_head_dim, "linear_value_head_dim"}});
        list.Add("linear_attn.out_proj.weight", {hidden, values});
        break;
    }
  }
  list.SetPrefix("");
  list.Add("norm.weight", {hidden});
  if (!config.tie_word_embeddings) list.Add("lm_head.weight", {vocabulary, hidden});
  return list.Take();
}

std::vector<ExpectedTensor> ExpectedTensors(const DraftConfig& config) {
  const ExpectedSize hidden = {config.hidden_size, "hidden_size"};
  const ExpectedSize intermediate = {config.intermediate_size, "intermediate_size"};
  const ExpectedSize head_dim = {config.head_dim, "head_dim"};
  const ExpectedSize heads = {config.num_attention_heads * config.head_dim, "num_attention_heads * head_dim"};
  const ExpectedSize kv_heads = {config.num_key_value_heads * config.head_dim,
                                 "num_key_value_heads * head_dim"};

  Lister list;
  list.Add("fc.weight",
           {hidden, {config.num_taps() * config.hidden_size, "entries of target_layer_ids * hidden_size"}});
  list.Add("hidden_norm.weight", {hidden});
  for (int64_t i = 0; i < config.num_layers(); ++i) {
    list.SetPrefix(LayerPrefix(i));
    list.AddMlpAndNorms(hidden, intermediate);
    list.AddAttention(hidden, heads, heads, kv_heads, head_dim);
  }
  list.SetPrefix("");
  list.Add("norm.weight", {hidden});
  return list.Take();
}

}  // namespace dflash
