// Attention over paged keys and values plus the rows of the block itself.
// Sources: docs/spec/qwen3_5.md "Full-attention mixer", docs/spec/dflash.md "Attention masks and the sliding
// window".
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "base/matrix_view.h"
#include "base/phase.h"
#include "kernels/batch/segments.h"
#include "kernels/device/stream.h"

namespace dflash {

// One layer's pages of keys and values, `page_count` pages of PageBytes() bytes each in device memory. The
// layout inside a page belongs to the backend: write with StoreKeyValue, read with Attention or LoadKeyValue.
struct KeyValuePool {
  void* data = nullptr;
  int64_t page_count = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;

  // Bytes of one page: at least 64 tokens x kv_heads x head_dim x (key + value) in the activation dtype; a
  // backend may pad head_dim.
  int64_t PageBytes() const;
};

// What a query at absolute position q sees of a key at absolute position k:
//   (k <= q if causal) and (q - k < window if window > 0) and (k - q < window if window > 0 and not causal)
struct AttentionMask {
  bool causal = true;
  int64_t window = 0;  // 0: unlimited
};

// Writes the first row_counts[i] rows of segment i (all of them when row_counts is null) into the pages at
// their absolute positions. k, v: activation dtype [T, kv_heads * head_dim]; row_counts: int32, device
// memory. Rows whose page entry is negative are a caller's bug. Errors: InvalidArgument when shapes disagree.
absl::Status StoreKeyValue(ConstMatrixView k, ConstMatrixView v, SegmentList segments,
                           const int32_t* row_counts, PageTable table, const KeyValuePool& pool,
                           const Stream& stream);

// StoreKeyValue of several layers with the same segments and pages, in any order.
struct KeyValueRows {
  ConstMatrixView k, v;
  KeyValuePool pool;
};
absl::Status StoreKeyValues(const std::vector<KeyValueRows>& layers, SegmentList segments,
                            const int32_t* row_counts, PageTable table, const Stream& stream);

// Copies positions [first_position, first_position + k.rows) of a slot out of its pages (tests, doctor,
// transfers).
absl::Status LoadKeyValue(const KeyValuePool& pool, PageTable table, int64_t slot, int64_t first_position,
                          MatrixView k, MatrixView v, const Stream& stream);

// When the context of an Attention -- segments, context starts, table, pages of earlier positions -- was last
// written: what was complete before the stream's last NormAndRope began may be looked at while that still
// runs.
enum class ContextWritten { kAnyTime, kBeforeLastNormAndRope };

// For every row of every segment and every query head h (KV head h / (heads / kv_heads)):
//   out = softmax_k(scale * q . k + mask) v
// over the keys at positions [context_starts[slot], start_position), read from the pages, and the segment's
// own rows at [start_position, start_position + row_count), read from block_k and block_v and never from
// pages. q, out: activation dtype [T, heads * head_dim]; block_k, block_v: activation dtype [T, kv_heads *
// head_dim]; context_starts: int32 per slot, device memory, null = 0 everywhere; pages that lie wholly before
// it, or wholly outside the mask, are not looked at. A row that sees no key gets zeros. Exactness: scores,
// softmax and sums in float32; keys are reduced in blocks of 64 on the absolute position grid (block b holds
// positions [64 b, 64 b + 64)), inside a block in ascending order, blocks merged in ascending order, and a
// key has the same bits whether it comes from a page or from the block. So among rows of a phase, a row does
// not depend on its company, on the number of rows in the step, or on where earlier steps were cut. (How
// blocks are grouped on the way may differ between the phases, as the arithmetic of Linear does.)
// gate: where there is one, activation dtype [T, heads * head_dim], SigmoidGate (kernels/swiglu) of out and
// gate follows, with the bits of the two calls; rows outside every segment hold anything afterwards. Written
// as q is. No aliasing with out. Errors: InvalidArgument when shapes disagree or heads is no multiple of
// kv_heads.
absl::Status Attention(ConstMatrixView q, ConstMatrixView block_k, ConstMatrixView block_v,
                       SegmentList segments, const int32_t* context_starts, PageTable table,
                       const KeyValuePool& pool, const AttentionMask& mask, float scale, Phase phase,
                       MatrixView out, const Stream& stream,
                       ContextWritten written = ContextWritten::kAnyTime, ConstMatrixView gate = {});

}  // namespace dflash
