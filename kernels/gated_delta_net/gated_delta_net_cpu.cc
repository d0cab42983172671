#include "kernels/gated_delta_net/gated_delta_net_cpu.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/batch/segments_cpu.h"
#include "kernels/causal_conv/causal_conv_cpu.h"
#include "kernels/device/cpu/instruction_set.h"
#include "kernels/device/cpu/thread_pool.h"
#include "kernels/elementary/elementary.h"
#include "kernels/gated_delta_net/gated_delta_net_backend.h"
#include "kernels/rms_norm/rms_norm_cpu.h"

namespace dflash::backend {
namespace {

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

absl::Status CheckVerify(const char* operation, SegmentList segments, int64_t rows,
                         const PendingRecords& pending, const GatedDeltaNetState& state) {
  DFLASH_RETURN_IF_ERROR(CheckSegments(operation, segments, rows, state.slots));
  for (int64_t i = 0; i < segments.count; ++i) {
    const Segment& segment = segments.data[i];
    DFLASH_RETURN_IF_ERROR(CheckPending(operation, segment.slot, pending, state));
    if (segment.row_count > state.max_rows) {
      return absl::InvalidArgumentError(absl::StrCat(operation, ": segment ", i, " has ", segment.row_count,
                                                     " rows, records hold ", state.max_rows));
    }
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

const DeltaKernels& Kernels() {
  return ForCurrentInstructionSet(kDeltaKernelsScalar, kDeltaKernelsAvx2, kDeltaKernelsAvx512);
}

// What all value heads of a row need, computed once: normalized q and k, gates. In one block of memory.
struct PreparedRows {
  PreparedRows(int64_t rows, const GatedDeltaNetShape& shape) {
    const int64_t keys = rows * shape.key_heads * shape.key_dim, gates = rows * shape.value_heads;
    memory.reset(new float[static_cast<size_t>(2 * keys + rows * shape.key_heads + 3 * gates)]);
    q = memory.get();
    k = q + keys;
    key_query = k + keys;
    g = key_query + rows * shape.key_heads;
    beta = g + gates;
    decay = beta + gates;
  }
  std::unique_ptr<float[]> memory;
  float *q, *k;             // [rows, key_heads * key_dim]
  float* key_query;         // [rows, key_heads]
  float *g, *beta, *decay;  // [rows, value_heads]
};

// Of the rows of all segments; the others stay unset. q and k of a row are made by one part of the loop each.
PreparedRows Prepare(const GatedDeltaNetShape& shape, const GatedDeltaNetInput& input, SegmentList segments,
                     const Stream& stream) {
  const int64_t key_cols = shape.key_heads * shape.key_dim;
  PreparedRows prepared(input.qkv.rows, shape);
  const DeltaKernels& kernels = Kernels();
  const float scale = 1.0f / std::sqrt(static_cast<float>(shape.key_dim));
  for (int64_t i = 0; i < segments.count; ++i) {
    const Segment& segment = segments.data[i];
    ParallelFor(stream, segment.row_count, 4, [&](int64_t begin, int64_t end) {
      for (int64_t row = segment.first_row + begin; row < segment.first_row + end; ++row) {
        const float* qkv = input.qkv.Row<float>(row);
        kernels.keys({.q = qkv,
                      .k = qkv + key_cols,
                      .in_stride = shape.key_dim,
                      .count = shape.key_heads,
                      .dim = shape.key_dim,
                      .q_scale = scale,
                      .q_out = prepared.q + row * key_cols,
                      .k_out = prepared.k + row * key_cols,
                      .key_query = prepared.key_query + row * shape.key_heads});
        kernels.gates({.a = input.decay.Row<float>(row),
                       .b = input.beta.Row<float>(row),
                       .a_log = input.a_log,
                       .dt_bias = input.dt_bias,
                       .count = shape.value_heads,
                       .g = prepared.g + row * shape.value_heads,
                       .beta = prepared.beta + row * shape.value_heads,
                       .decay = prepared.decay + row * shape.value_heads});
      }
    });
  }
  return prepared;
}

// What verification and folding share: the pending records and the states of blocks of value heads.
class VerifyWork {
 public:
  VerifyWork(const GatedDeltaNetShape& shape, const PendingRecords& pending, const GatedDeltaNetState& state)
      : shape_(shape),
        pending_(pending),
        state_(state),
        group_(shape.value_heads / shape.key_heads),
        blocks_per_head_((shape.value_dim + kDeltaColumns - 1) / kDeltaColumns) {}

  // Blocks of all value heads of a key head, kMaxDeltaBlocks of them a part.
  int64_t parts_per_key_head() const {
    return (group_ * blocks_per_head_ + kMaxDeltaBlocks - 1) / kMaxDeltaBlocks;
  }
  int64_t scratch_floats() const { return DeltaVerifyScratchFloats(shape_.key_dim, state_.max_rows); }

  // Fills blocks and returns the task without rows.
  DeltaVerifyTask TaskOf(int64_t slot, int64_t key_head, int64_t part, DeltaBlock* blocks,
                         float* scratch) const {
    DeltaVerifyTask task = {};
    task.key_dim = shape_.key_dim;
    task.blocks = blocks;
    task.state_stride = shape_.value_dim;
    task.record_count = pending_.count[slot];
    task.record_stride = shape_.RecordFloats();
    task.scratch = scratch;
    const Record records = RecordAt(shape_, state_, slot, pending_.buffer[slot], 0);
    task.record_k = records.k + key_head * shape_.key_dim;
    const int64_t end = std::min((part + 1) * kMaxDeltaBlocks, group_ * blocks_per_head_);
    for (int64_t i = part * kMaxDeltaBlocks; i < end; ++i) {
      const int64_t head = HeadOf(key_head, i), column = ColumnOf(i);
      blocks[task.block_count++] = {
          .columns = std::min(kDeltaColumns, shape_.value_dim - column),
          .S =
              state_.states + (slot * shape_.value_heads + head) * shape_.key_dim * shape_.value_dim + column,
          .record_c = records.c + head * shape_.value_dim + column,
          .record_g = records.g + head,
          .v = nullptr,
          .beta = nullptr,
          .decay = nullptr,
          .c = nullptr,
          .o = nullptr};
    }
    return task;
  }
  int64_t HeadOf(int64_t key_head, int64_t block) const {
    return key_head * group_ + block / blocks_per_head_;
  }
  int64_t ColumnOf(int64_t block) const { return block % blocks_per_head_ * kDeltaColumns; }

 private:
  const GatedDeltaNetShape& shape_;
  const PendingRecords& pending_;
  const GatedDeltaNetState& state_;
  const int64_t group_, blocks_per_head_;
};

}  // namespace

absl::Status GatedDeltaNetVerify(const GatedDeltaNetShape& shape, const GatedDeltaNetInput& input,
                                 SegmentList segments, const PendingRecords& pending,
                                 const GatedDeltaNetState& state, MatrixView o, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckVerify("GatedDeltaNetVerify", segments, input.qkv.rows, pending, state));
  const PreparedRows prepared = Prepare(shape, input, segments, stream);
  const int64_t key_cols = shape.key_heads * shape.key_dim;
  const DeltaKernels& kernels = Kernels();
  const VerifyWork work(shape, pending, state);
  const int64_t parts = work.parts_per_key_head();
  ParallelFor(stream, segments.count * shape.key_heads * parts, 1, [&](int64_t begin, int64_t end) {
    DeltaBlock blocks[kMaxDeltaBlocks];
    const std::unique_ptr<float[]> scratch(new float[static_cast<size_t>(work.scratch_floats())]);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t part = item % parts, key_head = item / parts % shape.key_heads;
      const Segment& segment = segments.data[item / parts / shape.key_heads];
      if (segment.row_count == 0) continue;
      const int64_t row = segment.first_row;
      DeltaVerifyTask task = work.TaskOf(segment.slot, key_head, part, blocks, scratch.get());
      task.q = prepared.q + row * key_cols + key_head * shape.key_dim;
      task.k = prepared.k + row * key_cols + key_head * shape.key_dim;
      task.qk_stride = key_cols;
      task.key_query = prepared.key_query + row * shape.key_heads + key_head;
      task.key_query_stride = shape.key_heads;
      task.row_count = segment.row_count;
      task.v_stride = input.qkv.row_stride;
      task.o_stride = o.row_stride;
      task.gate_stride = shape.value_heads;
      const Record fresh = RecordAt(shape, state, segment.slot, 1 - pending.buffer[segment.slot], 0);
      for (int64_t t = 0; t < segment.row_count && part == 0; ++t) {
        std::copy_n(task.k + t * key_cols, shape.key_dim,
                    fresh.k + t * task.record_stride + key_head * shape.key_dim);
      }
      for (int64_t i = 0; i < task.block_count; ++i) {
        const int64_t head = work.HeadOf(key_head, part * kMaxDeltaBlocks + i);
        const int64_t column = work.ColumnOf(part * kMaxDeltaBlocks + i);
        const int64_t gate = row * shape.value_heads + head;
        blocks[i].v = input.qkv.Row<float>(row) + 2 * key_cols + head * shape.value_dim + column;
        blocks[i].beta = prepared.beta + gate;
        blocks[i].decay = prepared.decay + gate;
        blocks[i].c = fresh.c + head * shape.value_dim + column;
        blocks[i].o = o.Row<float>(row) + head * shape.value_dim + column;
        for (int64_t t = 0; t < segment.row_count && column == 0; ++t) {
          fresh.g[t * task.record_stride + head] = prepared.g[gate + t * shape.value_heads];
        }
      }
      kernels.verify(task);
    }
  });
  return absl::OkStatus();
}

namespace {

// What a thread needs for the rows of one key head and its value heads, between the projections of a layer.
// Used again from layer to layer, so it stays in the thread's caches.
class MixerScratch {
 public:
  void Fit(const GatedDeltaNetShape& shape, int64_t rows, int64_t verify_floats) {
    const int64_t group = shape.value_heads / shape.key_heads, gates = rows * group;
    convolved_cols = 2 * shape.key_dim + group * shape.value_dim;
    const int64_t sizes[] = {rows * convolved_cols,
                             rows * shape.key_dim,
                             rows * shape.key_dim,
                             rows,
                             verify_floats,
                             gates,
                             gates,
                             gates,
                             gates,
                             gates,
                             gates,
                             gates};
    float** const parts[] = {&convolved, &q,     &k,       &key_query, &verify, &a,
                             &b,         &a_log, &dt_bias, &g,         &beta,   &decay};
    int64_t floats = 0;
    for (const int64_t size : sizes) floats += PaddedToLanes(size);
    if (static_cast<int64_t>(memory_.size()) < floats) memory_.resize(static_cast<size_t>(floats));
    float* next = memory_.data();
    for (size_t i = 0; i < std::size(sizes); ++i) {
      *parts[i] = next;
      next += PaddedToLanes(sizes[i]);
    }
  }

  int64_t convolved_cols = 0;
  float* convolved = nullptr;                  // [rows, convolved_cols]: q, k, v of every value head
  float *q = nullptr, *k = nullptr;            // [rows, key_dim], normalized
  float* key_query = nullptr;                  // [rows]
  float* verify = nullptr;                     // of DeltaVerifyTask
  float *a = nullptr, *b = nullptr;            // [value heads, rows]: logits of decay and beta
  float *a_log = nullptr, *dt_bias = nullptr;  // [value heads, rows]: the same for all rows of a head
  float *g = nullptr, *beta = nullptr, *decay = nullptr;  // [value heads, rows]

 private:
  std::vector<float> memory_;
};

void Prefetch(const float* from, int64_t floats) {
  constexpr int64_t kLineFloats = 16;
  for (int64_t i = 0; i < floats; i += kLineFloats) __builtin_prefetch(from + i);
}

}  // namespace

// One part of the loop is a key head with its value heads: from its channels of the projection to the normed
// output it needs nothing of other heads, so nobody waits and nothing goes from one thread to another.
absl::Status GatedDeltaNetMixerVerify(const GatedDeltaNetShape& shape, const GatedDeltaNetInput& input,
                                      const GatedDeltaNetSurroundings& around, SegmentList segments,
                                      const PendingRecords& pending, const GatedDeltaNetState& state,
                                      MatrixView /*convolved*/, MatrixView o, const Stream& stream) {
  const int64_t all_rows = input.qkv.rows;
  DFLASH_RETURN_IF_ERROR(
      CheckSegments("GatedDeltaNetMixerVerify", segments, all_rows, around.conv_state.slots));
  DFLASH_RETURN_IF_ERROR(CheckVerify("GatedDeltaNetMixerVerify", segments, all_rows, pending, state));
  const int64_t key_dim = shape.key_dim, value_dim = shape.value_dim, key_cols = shape.key_heads * key_dim;
  const int64_t group = shape.value_heads / shape.key_heads;
  const float q_scale = 1.0f / std::sqrt(static_cast<float>(key_dim));
  const DeltaKernels& kernels = Kernels();
  ConvolveRows& convolve = CurrentConvolveRows();
  const RmsNormKernels& norms = CurrentRmsNormKernels();
  const NormGroup norm = NormGroupOf(around.norm_weight, NormWeight::kPlain, around.eps);
  const NormGate gate = NormGateOf(around.gate);
  const VerifyWork work(shape, pending, state);

  ParallelFor(stream, segments.count * shape.key_heads, 1, [&](int64_t begin, int64_t end) {
    thread_local MixerScratch scratch;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t key_head = item % shape.key_heads, first_head = key_head * group;
      const Segment& segment = segments.data[item / shape.key_heads];
      const int64_t rows = segment.row_count, row = segment.first_row;
      if (rows == 0) continue;
      scratch.Fit(shape, rows, work.scratch_floats());
      // The states and records have left the caches since the last step; they come while the rows are made.
      Prefetch(state.states + (segment.slot * shape.value_heads + first_head) * key_dim * value_dim,
               group * key_dim * value_dim);
      for (int64_t r = 0; r < pending.count[segment.slot]; ++r) {
        const Record record = RecordAt(shape, state, segment.slot, pending.buffer[segment.slot], r);
        Prefetch(record.k + key_head * key_dim, key_dim);
        Prefetch(record.c + first_head * value_dim, group * value_dim);
        Prefetch(record.g + first_head, group);
      }

      const std::pair<int64_t, int64_t> channels[] = {
          {key_head * key_dim, key_dim},
          {key_cols + key_head * key_dim, key_dim},
          {2 * key_cols + first_head * value_dim, group * value_dim}};
      float* convolved = scratch.convolved;
      for (const auto& [first, count] : channels) {
        ConvTask task = ConvTaskOf(input.qkv, around.conv_weight, segment, around.conv_state, first, count);
        task.y = convolved;
        task.y_stride = scratch.convolved_cols;
        convolve(task);
        convolved += count;
      }
      kernels.keys({.q = scratch.convolved,
                    .k = scratch.convolved + key_dim,
                    .in_stride = scratch.convolved_cols,
                    .count = rows,
                    .dim = key_dim,
                    .q_scale = q_scale,
                    .q_out = scratch.q,
                    .k_out = scratch.k,
                    .key_query = scratch.key_query});
      for (int64_t t = 0; t < rows; ++t) {
        for (int64_t i = 0; i < group; ++i) {
          scratch.a[i * rows + t] = input.decay.Row<float>(row + t)[first_head + i];
          scratch.b[i * rows + t] = input.beta.Row<float>(row + t)[first_head + i];
          scratch.a_log[i * rows + t] = input.a_log[first_head + i];
          scratch.dt_bias[i * rows + t] = input.dt_bias[first_head + i];
        }
      }
      kernels.gates({.a = scratch.a,
                     .b = scratch.b,
                     .a_log = scratch.a_log,
                     .dt_bias = scratch.dt_bias,
                     .count = rows * group,
                     .g = scratch.g,
                     .beta = scratch.beta,
                     .decay = scratch.decay});

      const Record fresh = RecordAt(shape, state, segment.slot, 1 - pending.buffer[segment.slot], 0);
      const int64_t record_stride = shape.RecordFloats();
      for (int64_t t = 0; t < rows; ++t) {
        std::copy_n(scratch.k + t * key_dim, key_dim, fresh.k + t * record_stride + key_head * key_dim);
        for (int64_t i = 0; i < group; ++i) {
          fresh.g[t * record_stride + first_head + i] = scratch.g[i * rows + t];
        }
      }
      for (int64_t part = 0; part < work.parts_per_key_head(); ++part) {
        DeltaBlock blocks[kMaxDeltaBlocks];
        DeltaVerifyTask task = work.TaskOf(segment.slot, key_head, part, blocks, scratch.verify);
        task.q = scratch.q;
        task.k = scratch.k;
        task.qk_stride = key_dim;
        task.key_query = scratch.key_query;
        task.key_query_stride = 1;
        task.row_count = rows;
        task.v_stride = scratch.convolved_cols;
        task.o_stride = o.row_stride;
        task.gate_stride = 1;
        for (int64_t i = 0; i < task.block_count; ++i) {
          const int64_t head = work.HeadOf(key_head, part * kMaxDeltaBlocks + i), own = head - first_head;
          const int64_t column = work.ColumnOf(part * kMaxDeltaBlocks + i);
          blocks[i].v = scratch.convolved + 2 * key_dim + own * value_dim + column;
          blocks[i].beta = scratch.beta + own * rows;
          blocks[i].decay = scratch.decay + own * rows;
          blocks[i].c = fresh.c + head * value_dim + column;
          blocks[i].o = o.Row<float>(row) + head * value_dim + column;
        }
        kernels.verify(task);
      }
      for (int64_t t = 0; t < rows; ++t) {
        for (int64_t head = first_head; head < first_head + group; ++head) {
          float* const out = o.Row<float>(row + t) + head * value_dim;
          norms.norm(norm, out, gate, around.z.Row<float>(row + t) + head * value_dim, out);
        }
      }
    }
  });
  return absl::OkStatus();
}

absl::Status GatedDeltaNetPrefill(const GatedDeltaNetShape& shape, const GatedDeltaNetInput& input,
                                  SegmentList segments, const GatedDeltaNetState& state, MatrixView o,
                                  const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckSegments("GatedDeltaNetPrefill", segments, input.qkv.rows, state.slots));
  const PreparedRows prepared = Prepare(shape, input, segments, stream);
  const int64_t key_cols = shape.key_heads * shape.key_dim, group = shape.value_heads / shape.key_heads;
  const DeltaKernels& kernels = Kernels();
  ParallelFor(stream, segments.count * shape.key_heads, 1, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> scratch(
        new float[static_cast<size_t>(DeltaChunkScratchFloats(shape.key_dim, shape.value_dim))]);
    for (int64_t item = begin; item < end; ++item) {
      const Segment& segment = segments.data[item / shape.key_heads];
      const int64_t key_head = item % shape.key_heads, head = key_head * group;
      for (int64_t first = 0; first < segment.row_count;) {
        const int64_t cell_end = kDeltaChunk - (segment.start_position + first) % kDeltaChunk;
        const int64_t rows = std::min(cell_end, segment.row_count - first);
        const int64_t row = segment.first_row + first;
        kernels.chunk(
            {.key_dim = shape.key_dim,
             .value_dim = shape.value_dim,
             .heads = group,
             .S = state.states + (segment.slot * shape.value_heads + head) * shape.key_dim * shape.value_dim,
             .row_count = rows,
             .q = prepared.q + row * key_cols + key_head * shape.key_dim,
             .k = prepared.k + row * key_cols + key_head * shape.key_dim,
             .qk_stride = key_cols,
             .v = input.qkv.Row<float>(row) + 2 * key_cols + head * shape.value_dim,
             .v_stride = input.qkv.row_stride,
             .o = o.Row<float>(row) + head * shape.value_dim,
             .o_stride = o.row_stride,
             .g = prepared.g + row * shape.value_heads + head,
             .beta = prepared.beta + row * shape.value_heads + head,
             .gate_stride = shape.value_heads,
             .scratch = scratch.get()});
        first += rows;
      }
    }
  });
  return absl::OkStatus();
}

absl::Status GatedDeltaNetFold(const GatedDeltaNetShape& shape, const int32_t* slots, int64_t slot_count,
                               const PendingRecords& pending, const GatedDeltaNetState& state,
                               const Stream& stream) {
  for (int64_t i = 0; i < slot_count; ++i) {
    DFLASH_RETURN_IF_ERROR(CheckPending("GatedDeltaNetFold", slots[i], pending, state));
  }
  const DeltaKernels& kernels = Kernels();
  const VerifyWork work(shape, pending, state);
  const int64_t parts = work.parts_per_key_head();
  ParallelFor(stream, slot_count * shape.key_heads * parts, 1, [&](int64_t begin, int64_t end) {
    DeltaBlock blocks[kMaxDeltaBlocks];
    const std::unique_ptr<float[]> scratch(new float[static_cast<size_t>(work.scratch_floats())]);
    for (int64_t item = begin; item < end; ++item) {
      kernels.verify(work.TaskOf(slots[item / parts / shape.key_heads], item / parts % shape.key_heads,
                                 item % parts, blocks, scratch.get()));
    }
  });
  return absl::OkStatus();
}

}  // namespace dflash::backend
