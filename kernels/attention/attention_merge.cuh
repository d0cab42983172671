// The end of attention: splits that lie in the workspace become rows of the output, and rows are gated.
#pragma once

#include <algorithm>

#include "kernels/attention/attention_plan.cuh"
#include "kernels/device/cuda/launch.cuh"
#include "kernels/elementary/elementary.h"

namespace dflash {
namespace {

constexpr int kMergeThreads = 256;
constexpr int kMergeBlocks = 2;  // of a multiprocessor

// Writes two neighbouring columns, the first of them even.
__device__ __forceinline__ void WriteRow(const AttentionTask& task, int64_t row, int32_t head, int column,
                                         float first, float second) {
  if (column >= task.head_dim) return;
  __nv_bfloat16* to = task.out.Row(row) + int64_t{head} * task.head_dim + column;
  if (task.out_aligned) {
    *reinterpret_cast<uint32_t*>(to) = PackBf16(first, second);
    return;
  }
  to[0] = __float2bfloat16_rn(first);
  if (column + 1 < task.head_dim) to[1] = __float2bfloat16_rn(second);
}

// Reads two neighbouring columns as WriteRow writes them; those beyond head_dim are zeros.
__device__ __forceinline__ float2 ReadRow(const AttentionTask& task, const Bf16Rows& rows, bool aligned,
                                          int64_t row, int32_t head, int column) {
  if (column >= task.head_dim) return make_float2(0, 0);
  const __nv_bfloat16* from = rows.Row(row) + int64_t{head} * task.head_dim + column;
  if (aligned) {
    const uint32_t pair = *reinterpret_cast<const uint32_t*>(from);
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  }
  return make_float2(__bfloat162float(from[0]),
                     column + 1 < task.head_dim ? __bfloat162float(from[1]) : 0.0f);
}

// Where the splits of one head of a row lie, for one of its kDim / 4 threads: four columns of the outputs,
// two neighbours and the two that are 8 behind, and the maxima and sums. From one split to the next all
// descend by as many floats.
struct HeadSplits {
  const float* outputs;
  const float* maxima;
  int32_t to_sums;
  int64_t step;
};

template <int kDim>
__device__ __forceinline__ HeadSplits SplitsOf(const AttentionTask& task, const ItemTable& table,
                                               const SegmentPlan& plan, int32_t index, int32_t row,
                                               int32_t head, int column) {
  const int32_t kv_head = task.group.Of(head);
  const int32_t packed =
      (row - plan.segment.first_row) * task.group.value + head - kv_head * task.group.value;
  const Divisor& rows_of_tile = table.TileRows(task);
  const int32_t tile = rows_of_tile.Of(packed), tile_row = packed - tile * rows_of_tile.value;
  const int32_t tile_rows = task.tile_rows.value;
  const int64_t slot_floats = SlotFloats<kDim>(tile_rows);
  const int64_t first_slot = table.of_splits[index] + SlotOf(task, plan, 0, tile, kv_head);
  const float* slot = task.workspace + first_slot * slot_floats;
  return {.outputs = slot + SlotOutput<kDim>(tile_row, column),
          .maxima = slot + SlotMaximum<kDim>(tile_rows, tile_row),
          .to_sums = SlotSum<kDim>(tile_rows, 0) - SlotMaximum<kDim>(tile_rows, 0),
          .step = -int64_t{plan.tiles} * task.kv_heads.value * slot_floats};
}

// Merges `count` splits in ascending order; the sum, and the thread's columns in `total`. Called by whole
// warps. Sixteen splits at a time: each of sixteen threads works out the factors of one (MergeRow, with a
// running maximum), then all take them in one after another. A count of 0 goes the way of sixteen splits of
// nothing.
__device__ __forceinline__ float MergeSplits(const HeadSplits& splits, int32_t count, float (&total)[4]) {
  constexpr int kAtOnce = 16;
  const int member = static_cast<int>(threadIdx.x) % kAtOnce;
  float maximum = -INFINITY, sum = 0;
#pragma unroll
  for (float& value : total) value = 0;
  int32_t split = 0;
  do {
    const bool exists = split + member < count;
    const int32_t left = count == 0 ? kAtOnce : count - split;
    const int64_t offset = (split + member) * splits.step;
    const float own_maximum = exists ? splits.maxima[offset] : -INFINITY;
    const float own_sum = exists ? splits.maxima[offset + splits.to_sums] : 0.0f;
    float4 part[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      part[i] = make_float4(0, 0, 0, 0);
      if (split + i < count) {
        part[i] = *reinterpret_cast<const float4*>(splits.outputs + (split + i) * splits.step);
      }
    }
    float now = own_maximum;  // the maximum up to and with the split
#pragma unroll
    for (int distance = 1; distance < kAtOnce; distance *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, now, distance, kAtOnce);
      if (member >= distance) now = fmaxf(now, other);
    }
    now = fmaxf(now, maximum);
    const float up = __shfl_up_sync(0xffffffffu, now, 1, kAtOnce), before = member == 0 ? maximum : up;
    const bool sees_nothing = now == -INFINITY;
    const float keep = sees_nothing ? 1.0f : ptx::Exp2(before - now);
    const float take = sees_nothing ? 0.0f : ptx::Exp2(own_maximum - now);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (i == left) break;
      const float k = __shfl_sync(0xffffffffu, keep, i, kAtOnce),
                  t = __shfl_sync(0xffffffffu, take, i, kAtOnce);
      sum = fmaf(__shfl_sync(0xffffffffu, own_sum, i, kAtOnce), t, sum * k);
      total[0] = fmaf(part[i].x, t, total[0] * k);
      total[1] = fmaf(part[i].y, t, total[1] * k);
      total[2] = fmaf(part[i].z, t, total[2] * k);
      total[3] = fmaf(part[i].w, t, total[3] * k);
    }
    maximum = __shfl_sync(0xffffffffu, now, kAtOnce - 1, kAtOnce);
    split += kAtOnce;
  } while (split < count);
  return sum;
}

// Merges the splits of every row and head, and gates rows where there is a gate. A unit is some heads of a
// row, kDim / 4 threads a head; a block takes every gridDim.x-th. The kernel before, which writes splits or
// whole rows, promises that what was before it is complete: which there will be is found out, and the gate
// read, while it runs.
template <int kDim>
__global__ void __launch_bounds__(kMergeThreads, kMergeBlocks)
    MergeKernel(const AttentionTask task, int32_t units, Divisor units_of_row) {
  constexpr int kThreadsPerHead = kDim / 4, kHeads = kMergeThreads / kThreadsPerHead;
  __shared__ ItemTable table;
  LetNextKernelStart();
  if (threadIdx.x < 32) BuildItemTable(task, table);
  __syncthreads();
  const bool is_split = IsSplit(task, table), is_gated = task.gate.data != nullptr;
  if (!is_split && !is_gated) units = 0;
  const int32_t heads = task.kv_heads.value * task.group.value;
  const int part_of_head = static_cast<int>(threadIdx.x) % kThreadsPerHead;
  const int column = part_of_head / 4 * 16 + part_of_head % 4 * 2;
  bool has_waited = false;
  for (auto unit = static_cast<int32_t>(blockIdx.x); unit < units; unit += static_cast<int32_t>(gridDim.x)) {
    const int32_t row = units_of_row.Of(unit);
    const int32_t own_head =
        (unit - row * units_of_row.value) * kHeads + static_cast<int32_t>(threadIdx.x) / kThreadsPerHead;
    const int32_t head = min(own_head, heads - 1);  // threads beyond the heads compute along
    const int32_t index = table.SegmentOfRow(task, row);
    if (index < 0) continue;
    const SegmentPlan plan = table.Plan(task, index);
    const int32_t count = is_split ? plan.splits : 1;
    if (count == 1 && !is_gated) continue;
    float gates[4] = {1, 1, 1, 1};
    if (is_gated) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const float2 gate = ReadRow(task, task.gate, task.gate_aligned, row, head, column + 4 * i);
        gates[i] = SigmoidF32(gate.x);
        gates[i + 1] = SigmoidF32(gate.y);
      }
    }
    float sum = 1, total[4];
    if (count > 1) {
      const HeadSplits splits = SplitsOf<kDim>(task, table, plan, index, row, head, column);
      // Before the wait once with nothing: what a few rows would wait for is the instructions.
#pragma unroll 1
      for (int32_t now = has_waited ? count : 0;; now = count) {
        sum = MergeSplits(splits, now, total);
        if (now > 0) break;
        WaitForPreviousKernel();
        has_waited = true;
      }
    } else {
      if (!has_waited) WaitForPreviousKernel();
      has_waited = true;
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const float2 done = ReadRow(task, task.out, task.out_aligned, row, head, column + 4 * i);
        total[i] = done.x;
        total[i + 1] = done.y;
      }
    }
    if (own_head >= heads) continue;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      float first = Normalized(total[i], sum), second = Normalized(total[i + 1], sum);
      if (is_gated) {  // of the rounded values, as by SigmoidGate
        first = Rounded(first) * gates[i];
        second = Rounded(second) * gates[i + 1];
      }
      WriteRow(task, row, head, column + 4 * i, first, second);
    }
  }
  if (!has_waited) WaitForPreviousKernel();  // who waits for this kernel waits for that one too
}

template <int kDim>
cudaError_t LaunchMerge(const AttentionTask& task, int64_t rows, const CudaContext& context) {
  constexpr int64_t kHeads = kMergeThreads / (kDim / 4);
  const int64_t units_of_row = CeilDiv(int64_t{task.kv_heads.value} * task.group.value, kHeads);
  const int64_t units = units_of_row * rows;
  const LaunchShape shape = {.grid = Grid(std::min<int64_t>(units, kMergeBlocks * context.multiprocessors)),
                             .block = dim3(kMergeThreads)};
  return Launch(context, shape, MergeKernel<kDim>, task, static_cast<int32_t>(units), Divisor(units_of_row));
}

}  // namespace
}  // namespace dflash
