#include "kernels/gated_delta_net/gated_delta_net_cpu.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/batch/segments_cpu.h"
#include "kernels/device/cpu/instruction_set.h"
#include "kernels/device/cpu/thread_pool.h"
#include "kernels/elementary/elementary.h"
#include "kernels/gated_delta_net/gated_delta_net_backend.h"

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

// What all value heads of a row need, computed once: normalized q and k, gates.
struct PreparedRows {
  std::vector<float> q, k;            // [rows, key_heads * key_dim]
  std::vector<float> key_query;       // [rows, key_heads]
  std::vector<float> g, beta, decay;  // [rows, value_heads]
};

// Of the rows of all segments; the others stay zero. q and k of a row are made by one part of the loop each.
PreparedRows Prepare(const GatedDeltaNetShape& shape, const GatedDeltaNetInput& input, SegmentList segments,
                     const Stream& stream) {
  const int64_t key_cols = shape.key_heads * shape.key_dim;
  PreparedRows prepared;
  prepared.q.resize(static_cast<size_t>(input.qkv.rows * key_cols));
  prepared.k.resize(prepared.q.size());
  prepared.key_query.resize(static_cast<size_t>(input.qkv.rows * shape.key_heads));
  prepared.g.resize(static_cast<size_t>(input.qkv.rows * shape.value_heads));
  prepared.beta.resize(prepared.g.size());
  prepared.decay.resize(prepared.g.size());
  const DeltaKernels& kernels = Kernels();
  const float scale = 1.0f / std::sqrt(static_cast<float>(shape.key_dim));
  for (int64_t i = 0; i < segments.count; ++i) {
    const Segment& segment = segments.data[i];
    ParallelFor(stream, segment.row_count, 4, [&](int64_t begin, int64_t end) {
      for (int64_t row = segment.first_row + begin; row < segment.first_row + end; ++row) {
        const float* qkv = input.qkv.Row<float>(row);
        for (int64_t head = 0; head < shape.key_heads; ++head) {
          float* q = prepared.q.data() + row * key_cols + head * shape.key_dim;
          float* k = prepared.k.data() + row * key_cols + head * shape.key_dim;
          kernels.l2_norm(qkv + head * shape.key_dim, shape.key_dim, scale, q);
          kernels.l2_norm(qkv + key_cols + head * shape.key_dim, shape.key_dim, 1, k);
          prepared.key_query[static_cast<size_t>(row * shape.key_heads + head)] =
              kernels.dot(k, q, shape.key_dim);
        }
        kernels.gates({.a = input.decay.Row<float>(row),
                       .b = input.beta.Row<float>(row),
                       .a_log = input.a_log,
                       .dt_bias = input.dt_bias,
                       .heads = shape.value_heads,
                       .g = prepared.g.data() + row * shape.value_heads,
                       .beta = prepared.beta.data() + row * shape.value_heads,
                       .decay = prepared.decay.data() + row * shape.value_heads});
      }
    });
  }
  return prepared;
}

// The records of one value head that are still to be folded into its state.
void CollectRecords(const GatedDeltaNetShape& shape, const PendingRecords& pending,
                    const GatedDeltaNetState& state, int64_t slot, int64_t head,
                    std::vector<DeltaRecord>& records) {
  const int64_t key_head = head / (shape.value_heads / shape.key_heads);
  records.clear();
  for (int64_t r = 0; r < pending.count[slot]; ++r) {
    const Record record = RecordAt(shape, state, slot, pending.buffer[slot], r);
    records.push_back(
        {record.k + key_head * shape.key_dim, record.c + head * shape.value_dim, ExpF32(record.g[head])});
  }
}

DeltaVerifyTask TaskOf(const GatedDeltaNetShape& shape, const GatedDeltaNetState& state, int64_t slot,
                       int64_t head, const std::vector<DeltaRecord>& records,
                       const std::vector<DeltaRow>& rows, std::vector<float>& scratch) {
  return {.key_dim = shape.key_dim,
          .value_dim = shape.value_dim,
          .S = state.states + (slot * shape.value_heads + head) * shape.key_dim * shape.value_dim,
          .records = records.data(),
          .record_count = static_cast<int64_t>(records.size()),
          .rows = rows.data(),
          .row_count = static_cast<int64_t>(rows.size()),
          .scratch = scratch.data()};
}

}  // namespace

absl::Status GatedDeltaNetVerify(const GatedDeltaNetShape& shape, const GatedDeltaNetInput& input,
                                 SegmentList segments, const PendingRecords& pending,
                                 const GatedDeltaNetState& state, MatrixView o, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckSegments("GatedDeltaNetVerify", segments, input.qkv.rows, state.slots));
  for (int64_t i = 0; i < segments.count; ++i) {
    const Segment& segment = segments.data[i];
    DFLASH_RETURN_IF_ERROR(CheckPending("GatedDeltaNetVerify", segment.slot, pending, state));
    if (segment.row_count > state.max_rows) {
      return absl::InvalidArgumentError(absl::StrCat("GatedDeltaNetVerify: segment ", i, " has ",
                                                     segment.row_count, " rows, records hold ",
                                                     state.max_rows));
    }
  }
  const PreparedRows prepared = Prepare(shape, input, segments, stream);
  const int64_t key_cols = shape.key_heads * shape.key_dim, group = shape.value_heads / shape.key_heads;
  const DeltaKernels& kernels = Kernels();
  ParallelFor(stream, segments.count * shape.value_heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<DeltaRecord> records;
    std::vector<DeltaRow> rows;
    std::vector<float> scratch(static_cast<size_t>(DeltaVerifyScratchFloats(shape.key_dim)));
    for (int64_t item = begin; item < end; ++item) {
      const Segment& segment = segments.data[item / shape.value_heads];
      const int64_t head = item % shape.value_heads, key_head = head / group;
      const int64_t fresh = 1 - pending.buffer[segment.slot];
      rows.clear();
      for (int64_t t = 0; t < segment.row_count; ++t) {
        const int64_t row = segment.first_row + t;
        const Record record = RecordAt(shape, state, segment.slot, fresh, t);
        const float* k = prepared.k.data() + row * key_cols + key_head * shape.key_dim;
        const auto gate = static_cast<size_t>(row * shape.value_heads + head);
        if (head % group == 0) std::copy_n(k, shape.key_dim, record.k + key_head * shape.key_dim);
        record.g[head] = prepared.g[gate];
        rows.push_back(
            {.q = prepared.q.data() + row * key_cols + key_head * shape.key_dim,
             .k = k,
             .v = input.qkv.Row<float>(row) + 2 * key_cols + head * shape.value_dim,
             .key_query = prepared.key_query[static_cast<size_t>(row * shape.key_heads + key_head)],
             .beta = prepared.beta[gate],
             .decay = prepared.decay[gate],
             .c = record.c + head * shape.value_dim,
             .o = o.Row<float>(row) + head * shape.value_dim});
      }
      CollectRecords(shape, pending, state, segment.slot, head, records);
      kernels.verify(TaskOf(shape, state, segment.slot, head, records, rows, scratch));
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
    std::vector<float> scratch(static_cast<size_t>(DeltaChunkScratchFloats(shape.key_dim, shape.value_dim)));
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
             .q = prepared.q.data() + row * key_cols + key_head * shape.key_dim,
             .k = prepared.k.data() + row * key_cols + key_head * shape.key_dim,
             .qk_stride = key_cols,
             .v = input.qkv.Row<float>(row) + 2 * key_cols + head * shape.value_dim,
             .v_stride = input.qkv.row_stride,
             .o = o.Row<float>(row) + head * shape.value_dim,
             .o_stride = o.row_stride,
             .g = prepared.g.data() + row * shape.value_heads + head,
             .beta = prepared.beta.data() + row * shape.value_heads + head,
             .gate_stride = shape.value_heads,
             .scratch = scratch.data()});
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
  ParallelFor(stream, slot_count * shape.value_heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<DeltaRecord> records;
    std::vector<float> scratch(static_cast<size_t>(DeltaVerifyScratchFloats(shape.key_dim)));
    for (int64_t item = begin; item < end; ++item) {
      const int64_t slot = slots[item / shape.value_heads], head = item % shape.value_heads;
      CollectRecords(shape, pending, state, slot, head, records);
      kernels.verify(TaskOf(shape, state, slot, head, records, {}, scratch));
    }
  });
  return absl::OkStatus();
}

}  // namespace dflash::backend
