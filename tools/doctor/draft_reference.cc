#include "tools/doctor/draft_reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/dtype.h"
#include "base/status.h"
#include "kernels/linear/linear_ref.h"
#include "kernels/rms_norm/rms_norm_ref.h"
#include "kernels/rope/rope_ref.h"
#include "kernels/swiglu/swiglu_ref.h"

namespace dflash::doctor {
namespace {

std::string Of(size_t layer, const char* name) { return absl::StrCat("layers.", layer, ".", name); }

absl::StatusOr<std::vector<float>> ReadFloats(const Checkpoint& checkpoint, const TensorInfo& tensor,
                                              const TensorBlock& block) {
  DFLASH_ASSIGN_OR_RETURN(const HostTensor stored, checkpoint.Read(tensor, block));
  const auto count = static_cast<size_t>(block.row_count * block.col_count);
  std::vector<float> values(count);
  switch (stored.dtype()) {
    case DType::kF32: {
      const auto* from = static_cast<const float*>(stored.view().data);
      std::copy_n(from, count, values.begin());
      break;
    }
    case DType::kBf16: {
      const auto* from = static_cast<const bf16*>(stored.view().data);
      std::transform(from, from + count, values.begin(),
                     [](bf16 value) { return static_cast<float>(value); });
      break;
    }
  }
  return values;
}

// Of a dot product.
double SumOfSquaredTerms(const double* x, const float* w, int64_t count) {
  double squares = 0;
  for (int64_t d = 0; d < count; ++d) squares += std::pow(x[d] * w[d], 2);
  return squares;
}

}  // namespace

absl::StatusOr<Rows> DraftReference::Moved(const Rounding& rounding, uint64_t seed,
                                           const std::function<absl::StatusOr<Rows>()>& stage) {
  rounding_ = rounding;
  sign_state_ = 0x9e3779b97f4a7c15 * (2 * seed + 1);  // odd, so never 0
  absl::StatusOr<Rows> moved = stage();
  sign_state_ = 0;
  return moved;
}

double DraftReference::Sign() {
  sign_state_ ^= sign_state_ << 13, sign_state_ ^= sign_state_ >> 7, sign_state_ ^= sign_state_ << 17;
  return sign_state_ >> 63 == 0 ? 1 : -1;
}

// Below its normal range float32 is coarser, or flushed to zero.
double DraftReference::RoundedNumber(double value) {
  if (sign_state_ == 0) return value;
  return value + Sign() * (rounding_.number * std::abs(value) + std::numeric_limits<float>::min());
}

double DraftReference::RoundedSum(double sum, double squares, int64_t count) {
  if (sign_state_ == 0) return sum;
  return sum + Sign() * rounding_.sum * std::sqrt(static_cast<double>(count) * squares);
}

Rows DraftReference::Rounded(Rows rows) {
  if (sign_state_ == 0) return rows;
  for (double& value : rows.values) value = RoundedNumber(value);
  return rows;
}

void DraftReference::Note(double value) {
  largest_ = std::isfinite(value) ? std::max(largest_, std::abs(value)) : HUGE_VAL;
}
void DraftReference::Note(const Rows& rows) {
  for (const double value : rows.values) Note(value);
}

absl::StatusOr<const std::vector<float>*> DraftReference::Weight(const std::string& name) {
  const auto found = weights_.find(name);
  if (found != weights_.end()) return &found->second;
  const TensorInfo& tensor = drafter_.Get(name);
  DFLASH_ASSIGN_OR_RETURN(std::vector<float> values, ReadFloats(drafter_, tensor, tensor.All()));
  return &weights_.emplace(name, std::move(values)).first->second;
}

absl::StatusOr<Rows> DraftReference::Linear(const Rows& x, const std::string& weight) {
  DFLASH_ASSIGN_OR_RETURN(const std::vector<float>* w, Weight(weight));
  const int64_t cols = drafter_.Get(weight).rows();
  if (static_cast<int64_t>(w->size()) != cols * x.cols)
    return absl::InternalError(absl::StrCat(weight, ": read with ", x.cols, " inputs"));
  return Rounded(Product(x, *w, cols));
}

Rows DraftReference::Product(const Rows& x, const std::vector<float>& w, int64_t cols) {
  Rows y(x.rows, cols);
  LinearRef<double>(x.values.data(), w.data(), x.rows, cols, x.cols, y.values.data());
  for (int64_t i = 0; sign_state_ != 0 && i < y.rows; ++i) {
    for (int64_t column = 0; column < cols; ++column) {
      const double squares = SumOfSquaredTerms(x.row(i), w.data() + column * x.cols, x.cols);
      Note(std::sqrt(squares));
      y.row(i)[column] = RoundedSum(y.row(i)[column], squares, x.cols);
    }
  }
  Note(y);
  return y;
}

void DraftReference::NormInto(const double* x, const std::vector<float>& w, double offset, int64_t dim,
                              double* y) {
  double sum = 0, fourths = 0;
  for (int64_t d = 0; d < dim; ++d) {
    const double square = x[d] * x[d];
    sum += square;
    fourths += square * square;
  }
  Note(sum);
  // Another sum scales all of y.
  const auto root = [&](double of) {
    return std::sqrt(of / static_cast<double>(dim) + config_.rms_norm_eps);
  };
  const double scale = root(sum) / root(RoundedSum(sum, fourths, dim));
  RmsNormRef<double>(x, w.data(), offset, config_.rms_norm_eps, dim, y);
  for (int64_t d = 0; d < dim; ++d) y[d] *= scale;
}

absl::StatusOr<Rows> DraftReference::Norm(const Rows& x, const std::string& weight, double offset) {
  DFLASH_ASSIGN_OR_RETURN(const std::vector<float>* w, Weight(weight));
  Rows y(x.rows, x.cols);
  for (int64_t i = 0; i < x.rows; ++i) {
    NormInto(x.row(i), *w, offset, x.cols, y.row(i));
  }
  Note(y);
  return Rounded(std::move(y));
}

absl::StatusOr<Rows> DraftReference::HeadNorm(Rows x, const std::string& weight) {
  DFLASH_ASSIGN_OR_RETURN(const std::vector<float>* w, Weight(weight));
  for (int64_t i = 0; i < x.rows; ++i) {
    for (int64_t head = 0; head < x.cols; head += config_.head_dim) {
      NormInto(x.row(i) + head, *w, 0, config_.head_dim, x.row(i) + head);
    }
  }
  Note(x);
  return Rounded(std::move(x));
}

absl::StatusOr<Rows> DraftReference::Features(const Rows& taps, FusionForm form) {
  DFLASH_ASSIGN_OR_RETURN(Rows fused, Linear(taps, "fc.weight"));
  switch (form) {
    case FusionForm::kPlain:
      return Norm(fused, "hidden_norm.weight");
    case FusionForm::kOnePlus:
      return Norm(fused, "hidden_norm.weight", 1.0);
    case FusionForm::kUnnormed:
      return fused;
  }
  return absl::InternalError("unknown form");
}

absl::StatusOr<Rows> DraftReference::Keys(size_t layer, const Rows& x) {
  DFLASH_ASSIGN_OR_RETURN(Rows k, Linear(x, Of(layer, "self_attn.k_proj.weight")));
  return HeadNorm(std::move(k), Of(layer, "self_attn.k_norm.weight"));
}
absl::StatusOr<Rows> DraftReference::Values(size_t layer, const Rows& x) {
  return Linear(x, Of(layer, "self_attn.v_proj.weight"));
}
absl::StatusOr<Rows> DraftReference::Queries(size_t layer, const Rows& x) {
  DFLASH_ASSIGN_OR_RETURN(Rows q, Linear(x, Of(layer, "self_attn.q_proj.weight")));
  return HeadNorm(std::move(q), Of(layer, "self_attn.q_norm.weight"));
}
absl::StatusOr<Rows> DraftReference::InputNorm(size_t layer, const Rows& h) {
  return Norm(h, Of(layer, "input_layernorm.weight"));
}
absl::StatusOr<Rows> DraftReference::Output(const Rows& h) { return Norm(h, "norm.weight"); }

Rows DraftReference::Rotate(const Rows& rows, const std::vector<int64_t>& positions,
                            const Rotation& rotation) {
  const int64_t dim = config_.head_dim;
  const int64_t rotary = 2 * std::lround(rotation.fraction * static_cast<double>(dim) / 2);
  Rows rotated = rows;
  std::vector<double> head(static_cast<size_t>(rotary));
  for (int64_t i = 0; i < rows.rows; ++i) {
    const int64_t position = std::max<int64_t>(0, positions[static_cast<size_t>(i)] + rotation.shift);
    for (int64_t first = 0; first < rows.cols; first += dim) {
      double* at = rotated.row(i) + first;
      if (!rotation.interleaved) {
        RopeRef<double>(at, rotary, rotation.theta, position);
        continue;
      }
      // Pairs (2 j, 2 j + 1) instead of (j, j + half).
      const int64_t half = rotary / 2;
      for (int64_t j = 0; j < rotary; ++j)
        head[static_cast<size_t>(j)] = at[j < half ? 2 * j : 2 * (j - half) + 1];
      RopeRef<double>(head.data(), rotary, rotation.theta, position);
      for (int64_t j = 0; j < rotary; ++j)
        at[j < half ? 2 * j : 2 * (j - half) + 1] = head[static_cast<size_t>(j)];
    }
  }
  return Rounded(std::move(rotated));
}

Rows DraftReference::Attend(const Rows& q, const Rows& k, const Rows& v, int64_t start,
                            const LayerContext& context, const DraftLayerMask& mask) {
  const int64_t dim = config_.head_dim;
  const int64_t heads = q.cols / dim;
  const int64_t group = heads / (k.cols / dim);
  const double scale = 1.0 / std::sqrt(static_cast<double>(dim));
  Rows out(q.rows, q.cols);
  std::vector<double> weights;
  std::vector<const double*> values;
  for (int64_t i = 0; i < q.rows; ++i) {
    const int64_t at = start + i;
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t column = head / group * dim;
      const double* query = q.row(i) + head * dim;
      weights.clear();
      values.clear();
      double most = -HUGE_VAL;
      const auto see = [&](int64_t position, const double* key, const double* value) {
        const int64_t distance = at - position;
        if (mask.causal && distance < 0) return;
        if (mask.window > 0 && distance >= mask.window) return;
        if (mask.window > 0 && !mask.causal && -distance >= mask.window) return;
        double score = 0, squares = 0;
        for (int64_t d = 0; d < dim; ++d) {
          const double term = query[d] * key[d];
          score += term;
          squares += term * term;
        }
        Note(score);
        score = RoundedSum(score, squares, dim);
        weights.push_back(score * scale);
        values.push_back(value);
        most = std::max(most, weights.back());
      };
      for (int64_t row = 0; row < context.k.rows; ++row)
        see(context.first_position + row, context.k.row(row) + column, context.v.row(row) + column);
      for (int64_t row = 0; row < k.rows; ++row) see(start + row, k.row(row) + column, v.row(row) + column);
      double sum = 0;
      for (double& weight : weights) sum += weight = RoundedNumber(std::exp(weight - most));
      double* result = out.row(i) + head * dim;
      for (int64_t d = 0; d < dim; ++d) {
        double squares = 0;
        for (size_t n = 0; n < weights.size(); ++n) {
          const double term = weights[n] / sum * values[n][d];
          result[d] += term;
          squares += term * term;
        }
        result[d] = RoundedSum(result[d], squares, static_cast<int64_t>(weights.size()));
      }
    }
  }
  return Rounded(std::move(out));
}

absl::StatusOr<Rows> DraftReference::LayerOutput(size_t layer, const Rows& h, const Rows& attended) {
  DFLASH_ASSIGN_OR_RETURN(Rows residual, Linear(attended, Of(layer, "self_attn.o_proj.weight")));
  for (size_t i = 0; i < residual.values.size(); ++i) residual.values[i] += h.values[i];
  residual = Rounded(std::move(residual));
  DFLASH_ASSIGN_OR_RETURN(const Rows x, Norm(residual, Of(layer, "post_attention_layernorm.weight")));
  DFLASH_ASSIGN_OR_RETURN(const Rows gate, Linear(x, Of(layer, "mlp.gate_proj.weight")));
  DFLASH_ASSIGN_OR_RETURN(const Rows up, Linear(x, Of(layer, "mlp.up_proj.weight")));
  Rows both(x.rows, 2 * gate.cols), activated(x.rows, gate.cols);
  for (int64_t i = 0; i < x.rows; ++i) {
    std::copy_n(gate.row(i), gate.cols, both.row(i));
    std::copy_n(up.row(i), up.cols, both.row(i) + gate.cols);
  }
  SwiGluRef<double>(both.values.data(), x.rows, gate.cols, activated.values.data());
  Note(activated);
  activated = Rounded(std::move(activated));
  DFLASH_ASSIGN_OR_RETURN(const Rows down, Linear(activated, Of(layer, "mlp.down_proj.weight")));
  for (size_t i = 0; i < residual.values.size(); ++i) residual.values[i] += down.values[i];
  Note(residual);
  return Rounded(std::move(residual));
}

absl::StatusOr<Rows> DraftReference::Embedding(const std::vector<int32_t>& ids) {
  const TensorInfo& tensor = target_.Get("embed_tokens.weight");
  Rows rows(0, tensor.cols());
  for (const int32_t id : ids) {
    DFLASH_ASSIGN_OR_RETURN(const std::vector<float> values, ReadFloats(target_, tensor, tensor.Rows(id, 1)));
    rows.Append(Rows(1, tensor.cols(), values));
  }
  return rows;
}

absl::StatusOr<std::vector<float>> DraftReference::HeadRows(int64_t first, int64_t count) {
  const TensorInfo* head = target_.Find("lm_head.weight");
  const TensorInfo& tensor = head != nullptr ? *head : target_.Get("embed_tokens.weight");  // tied
  return ReadFloats(target_, tensor, tensor.Rows(first, count));
}

absl::StatusOr<Rows> DraftReference::HeadRow(int64_t id) {
  DFLASH_ASSIGN_OR_RETURN(const std::vector<float> values, HeadRows(id, 1));
  return Rows(1, static_cast<int64_t>(values.size()), values);
}

absl::StatusOr<Rows> DraftReference::Logits(const Rows& y, int64_t first, int64_t count) {
  DFLASH_ASSIGN_OR_RETURN(const std::vector<float> head, HeadRows(first, count));
  return Product(y, head, count);
}

absl::StatusOr<double> DraftReference::LogitRounding(const Rounding& rounding, const Rows& y, int64_t id) {
  DFLASH_ASSIGN_OR_RETURN(const std::vector<float> head, HeadRows(id, 1));
  const double size = std::sqrt(SumOfSquaredTerms(y.values.data(), head.data(), y.cols));
  Note(size);
  return size * (rounding.number + rounding.sum * std::sqrt(static_cast<double>(y.cols)));
}

}  // namespace dflash::doctor
