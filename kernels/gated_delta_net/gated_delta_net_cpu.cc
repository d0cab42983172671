#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/batch/segments_cpu.h"
#include "kernels/device/cpu/thread_pool.h"
#include "kernels/elementary/elementary.h"
#include "kernels/gated_delta_net/gated_delta_net.h"

namespace dflash {
namespace {

constexpr int64_t kChunk = kPageTokens;

absl::Status CheckShape(const char* operation, const GatedDeltaNetShape& shape) {
  if (shape.key_heads < 1 || shape.value_heads < 1 || shape.value_heads % shape.key_heads != 0 ||
      shape.key_dim < 1 || shape.value_dim < 1) {
    return absl::InvalidArgumentError(absl::StrCat(operation, ": ", shape.key_heads, " key heads of ",
                                                   shape.key_dim, ", ", shape.value_heads, " value heads of ",
                                                   shape.value_dim));
  }
  return absl::OkStatus();
}

absl::Status CheckInput(const char* operation, const GatedDeltaNetShape& shape,
                        const GatedDeltaNetInput& input, SegmentList segments,
                        const GatedDeltaNetState& state, const MatrixView& o) {
  DFLASH_RETURN_IF_ERROR(CheckShape(operation, shape));
  const int64_t rows = input.qkv.rows;
  const auto matches = [&](const ConstMatrixView& view, int64_t cols) {
    return view.dtype == DType::kF32 && view.rows == rows && view.cols == cols;
  };
  if (!matches(input.qkv, shape.QkvCols()) || !matches(input.beta, shape.value_heads) ||
      !matches(input.decay, shape.value_heads) || !matches(o, shape.value_heads * shape.value_dim) ||
      input.a_log == nullptr || input.dt_bias == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        operation, ": qkv ", rows, "x", input.qkv.cols, ", beta ", input.beta.rows, "x", input.beta.cols,
        ", decay ", input.decay.rows, "x", input.decay.cols, ", o ", o.rows, "x", o.cols,
        " must be float32 [", rows, ", ", shape.QkvCols(), "], [", rows, ", ", shape.value_heads,
        "] twice and [", rows, ", ", shape.value_heads * shape.value_dim, "]"));
  }
  return CheckSegments(operation, segments, rows, state.slots);
}

absl::Status CheckPending(const char* operation, int64_t slot, const PendingRecords& pending,
                          const GatedDeltaNetState& state) {
  if (slot < 0 || slot >= state.slots) {
    return absl::InvalidArgumentError(absl::StrCat(operation, ": slot ", slot, " of ", state.slots));
  }
  if (pending.count[slot] < 0 || pending.count[slot] > state.max_rows || (pending.buffer[slot] & ~1) != 0) {
    return absl::InvalidArgumentError(absl::StrCat(operation, ": slot ", slot, " has ", pending.count[slot],
                                                   " of ", state.max_rows, " records pending in buffer ",
                                                   pending.buffer[slot]));
  }
  return absl::OkStatus();
}

// A record, field by field.
struct Record {
  float* k;  // [key_heads, key_dim]
  float* c;  // [value_heads, value_dim]
  float* g;  // [value_heads]
};

Record RecordAt(const GatedDeltaNetShape& shape, const GatedDeltaNetState& state, int64_t slot,
                int64_t buffer, int64_t row) {
  float* base = state.records + ((slot * 2 + buffer) * state.max_rows + row) * shape.RecordFloats();
  float* c = base + shape.key_heads * shape.key_dim;
  return {base, c, c + shape.value_heads * shape.value_dim};
}

float Dot(const float* a, const float* b, int64_t size) {
  float sum = 0;
  for (int64_t d = 0; d < size; ++d) sum = std::fma(a[d], b[d], sum);
  return sum;
}

void L2Norm(const float* x, int64_t size, float scale, float* y) {
  const float factor = scale / std::sqrt(Dot(x, x, size) + 1e-6f);
  for (int64_t d = 0; d < size; ++d) y[d] = x[d] * factor;
}

// The gates of one row and value head.
float Beta(const GatedDeltaNetInput& input, int64_t row, int64_t head) {
  return SigmoidF32(input.beta.Row<float>(row)[head]);
}
float LogDecay(const GatedDeltaNetInput& input, int64_t row, int64_t head) {
  return -ExpF32(input.a_log[head]) * SoftplusF32(input.decay.Row<float>(row)[head] + input.dt_bias[head]);
}

// S <- decay S + k c'
void Update(const float* k, const float* c, float decay, int64_t key_dim, int64_t value_dim, float* S) {
  for (int64_t d = 0; d < key_dim; ++d, S += value_dim) {
    for (int64_t e = 0; e < value_dim; ++e) S[e] = std::fma(k[d], c[e], decay * S[e]);
  }
}

// out = S'x
void Read(const float* S, const float* x, int64_t key_dim, int64_t value_dim, float* out) {
  std::fill_n(out, value_dim, 0.0f);
  for (int64_t d = 0; d < key_dim; ++d, S += value_dim) {
    for (int64_t e = 0; e < value_dim; ++e) out[e] = std::fma(x[d], S[e], out[e]);
  }
}

void FoldHead(const GatedDeltaNetShape& shape, const PendingRecords& pending, const GatedDeltaNetState& state,
              int64_t slot, int64_t head) {
  float* S = state.states + (slot * shape.value_heads + head) * shape.key_dim * shape.value_dim;
  const int64_t key_head = head / (shape.value_heads / shape.key_heads);
  for (int64_t r = 0; r < pending.count[slot]; ++r) {
    const Record record = RecordAt(shape, state, slot, pending.buffer[slot], r);
    Update(record.k + key_head * shape.key_dim, record.c + head * shape.value_dim, ExpF32(record.g[head]),
           shape.key_dim, shape.value_dim, S);
  }
}

}  // namespace

absl::Status GatedDeltaNetVerify(const GatedDeltaNetShape& shape, const GatedDeltaNetInput& input,
                                 SegmentList segments, const PendingRecords& pending,
                                 const GatedDeltaNetState& state, MatrixView o, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckInput("GatedDeltaNetVerify", shape, input, segments, state, o));
  for (int64_t i = 0; i < segments.count; ++i) {
    const Segment& segment = segments.data[i];
    DFLASH_RETURN_IF_ERROR(CheckPending("GatedDeltaNetVerify", segment.slot, pending, state));
    if (segment.row_count > state.max_rows) {
      return absl::InvalidArgumentError(absl::StrCat("GatedDeltaNetVerify: segment ", i, " has ",
                                                     segment.row_count, " rows, records hold ",
                                                     state.max_rows));
    }
  }
  const int64_t key_dim = shape.key_dim, value_dim = shape.value_dim;
  const int64_t group = shape.value_heads / shape.key_heads;
  ParallelFor(stream, segments.count * shape.key_heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> q(static_cast<size_t>(key_dim)), S(static_cast<size_t>(key_dim * value_dim));
    std::vector<float> seen(static_cast<size_t>(value_dim));
    for (int64_t item = begin; item < end; ++item) {
      const Segment& segment = segments.data[item / shape.key_heads];
      const int64_t key_head = item % shape.key_heads;
      const int64_t fresh = 1 - pending.buffer[segment.slot];
      for (int64_t t = 0; t < segment.row_count; ++t) {
        const float* k = input.qkv.Row<float>(segment.first_row + t) + (shape.key_heads + key_head) * key_dim;
        L2Norm(k, key_dim, 1, RecordAt(shape, state, segment.slot, fresh, t).k + key_head * key_dim);
      }
      for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
        FoldHead(shape, pending, state, segment.slot, head);
        const float* committed =
            state.states + (segment.slot * shape.value_heads + head) * key_dim * value_dim;
        std::copy_n(committed, key_dim * value_dim, S.data());
        for (int64_t t = 0; t < segment.row_count; ++t) {
          const int64_t row = segment.first_row + t;
          const Record record = RecordAt(shape, state, segment.slot, fresh, t);
          const float* qkv = input.qkv.Row<float>(row);
          L2Norm(qkv + key_head * key_dim, key_dim, 1.0f / std::sqrt(static_cast<float>(key_dim)), q.data());
          const float* k = record.k + key_head * key_dim;
          const float* v = qkv + 2 * shape.key_heads * key_dim + head * value_dim;
          float* c = record.c + head * value_dim;
          float* out = o.Row<float>(row) + head * value_dim;
          const float g = LogDecay(input, row, head);
          const float decay = ExpF32(g), beta = Beta(input, row, head), kq = Dot(k, q.data(), key_dim);
          record.g[head] = g;
          Read(S.data(), k, key_dim, value_dim, seen.data());
          Read(S.data(), q.data(), key_dim, value_dim, out);
          for (int64_t e = 0; e < value_dim; ++e) {
            c[e] = beta * std::fma(-decay, seen[static_cast<size_t>(e)], v[e]);
            out[e] = std::fma(kq, c[e], decay * out[e]);
          }
          if (t + 1 < segment.row_count) Update(k, c, decay, key_dim, value_dim, S.data());
        }
      }
    }
  });
  return absl::OkStatus();
}

absl::Status GatedDeltaNetPrefill(const GatedDeltaNetShape& shape, const GatedDeltaNetInput& input,
                                  SegmentList segments, const GatedDeltaNetState& state, MatrixView o,
                                  const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckInput("GatedDeltaNetPrefill", shape, input, segments, state, o));
  const int64_t key_dim = shape.key_dim, value_dim = shape.value_dim;
  const int64_t group = shape.value_heads / shape.key_heads;
  ParallelFor(stream, segments.count * shape.key_heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> q(static_cast<size_t>(kChunk * key_dim)), k(q.size());
    std::vector<float> kk(static_cast<size_t>(kChunk * kChunk)), qk(kk.size());
    std::vector<float> delta(static_cast<size_t>(kChunk * value_dim)), seen(static_cast<size_t>(value_dim));
    float decay_sum[kChunk] = {};
    for (int64_t item = begin; item < end; ++item) {
      const Segment& segment = segments.data[item / shape.key_heads];
      const int64_t key_head = item % shape.key_heads;
      for (int64_t first = 0; first < segment.row_count;) {
        const int64_t in_cell = kChunk - (segment.start_position + first) % kChunk;
        const int64_t C = std::min<int64_t>(in_cell, segment.row_count - first);
        const int64_t row0 = segment.first_row + first;
        for (int64_t i = 0; i < C; ++i) {
          const float* qkv = input.qkv.Row<float>(row0 + i);
          float* qi = q.data() + i * key_dim;
          float* ki = k.data() + i * key_dim;
          L2Norm(qkv + key_head * key_dim, key_dim, 1.0f / std::sqrt(static_cast<float>(key_dim)), qi);
          L2Norm(qkv + (shape.key_heads + key_head) * key_dim, key_dim, 1, ki);
          for (int64_t j = 0; j <= i; ++j) {
            kk[static_cast<size_t>(i * kChunk + j)] = Dot(ki, k.data() + j * key_dim, key_dim);
            qk[static_cast<size_t>(i * kChunk + j)] = Dot(qi, k.data() + j * key_dim, key_dim);
          }
        }
        for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
          float* S = state.states + (segment.slot * shape.value_heads + head) * key_dim * value_dim;
          float sum = 0;
          for (int64_t i = 0; i < C; ++i) decay_sum[i] = sum += LogDecay(input, row0 + i, head);
          for (int64_t i = 0; i < C; ++i) {
            const float* v =
                input.qkv.Row<float>(row0 + i) + 2 * shape.key_heads * key_dim + head * value_dim;
            const float beta = Beta(input, row0 + i, head), decay = ExpF32(decay_sum[i]);
            float* out = o.Row<float>(row0 + i) + head * value_dim;
            float* di = delta.data() + i * value_dim;
            Read(S, k.data() + i * key_dim, key_dim, value_dim, seen.data());
            Read(S, q.data() + i * key_dim, key_dim, value_dim, out);
            for (int64_t e = 0; e < value_dim; ++e) {
              di[e] = std::fma(-decay, seen[static_cast<size_t>(e)], v[e]);
              out[e] *= decay;
            }
            for (int64_t j = 0; j <= i; ++j) {
              const float between = ExpF32(decay_sum[i] - decay_sum[j]);
              const float* dj = delta.data() + j * value_dim;
              if (j < i) {
                const float a = -(between * kk[static_cast<size_t>(i * kChunk + j)]);
                for (int64_t e = 0; e < value_dim; ++e) di[e] = std::fma(a, dj[e], di[e]);
              } else {
                for (int64_t e = 0; e < value_dim; ++e) di[e] *= beta;
              }
              const float b = between * qk[static_cast<size_t>(i * kChunk + j)];
              for (int64_t e = 0; e < value_dim; ++e) out[e] = std::fma(b, dj[e], out[e]);
            }
          }
          const float whole = ExpF32(decay_sum[C - 1]);
          for (int64_t d = 0; d < key_dim; ++d) {
            for (int64_t e = 0; e < value_dim; ++e) S[d * value_dim + e] *= whole;
          }
          for (int64_t i = 0; i < C; ++i) {
            const float rest = ExpF32(decay_sum[C - 1] - decay_sum[i]);
            for (int64_t d = 0; d < key_dim; ++d) {
              const float a = rest * k[static_cast<size_t>(i * key_dim + d)];
              for (int64_t e = 0; e < value_dim; ++e) {
                S[d * value_dim + e] =
                    std::fma(a, delta[static_cast<size_t>(i * value_dim + e)], S[d * value_dim + e]);
              }
            }
          }
        }
        first += C;
      }
    }
  });
  return absl::OkStatus();
}

absl::Status GatedDeltaNetFold(const GatedDeltaNetShape& shape, const int32_t* slots, int64_t slot_count,
                               const PendingRecords& pending, const GatedDeltaNetState& state,
                               const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckShape("GatedDeltaNetFold", shape));
  for (int64_t i = 0; i < slot_count; ++i) {
    DFLASH_RETURN_IF_ERROR(CheckPending("GatedDeltaNetFold", slots[i], pending, state));
  }
  ParallelFor(stream, slot_count * shape.value_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      FoldHead(shape, pending, state, slots[item / shape.value_heads], item % shape.value_heads);
    }
  });
  return absl::OkStatus();
}

}  // namespace dflash
