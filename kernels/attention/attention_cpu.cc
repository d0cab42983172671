#include "kernels/attention/attention_cpu.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/attention/attention_backend.h"
#include "kernels/batch/segments_cpu.h"
#include "kernels/device/cpu/instruction_set.h"
#include "kernels/device/cpu/thread_pool.h"

namespace dflash {

int64_t KeyValuePool::PageBytes() const {
  return kv_heads * KeyBlockFloats(head_dim) * static_cast<int64_t>(sizeof(float));
}

namespace backend {
namespace {

constexpr int64_t kMaxQueriesPerTask = 64;  // their running outputs stay in L2 beside one block

// The page that holds a position, or an error: what follows would read or write anywhere.
absl::StatusOr<int64_t> PageOf(const char* operation, PageTable table, const KeyValuePool& pool, int64_t slot,
                               int64_t position) {
  const int64_t index = position / kPageTokens;
  if (index >= table.pages_per_slot) {
    return absl::InvalidArgumentError(absl::StrCat(operation, ": position ", position, " of slot ", slot,
                                                   " is beyond its ", table.pages_per_slot, " pages"));
  }
  const int64_t page = table.pages[slot * table.pages_per_slot + index];
  if (page < 0 || page >= pool.page_count) {
    return absl::InvalidArgumentError(absl::StrCat(operation, ": position ", position, " of slot ", slot,
                                                   " has page ", page, " of ", pool.page_count));
  }
  return page;
}

float* BlockOf(const KeyValuePool& pool, int64_t page, int64_t kv_head) {
  return static_cast<float*>(pool.data) + (page * pool.kv_heads + kv_head) * KeyBlockFloats(pool.head_dim);
}

void WriteToken(const float* k, const float* v, int64_t head_dim, int64_t token, float* block) {
  for (int64_t d = 0; d < head_dim; ++d) block[d * kKeyBlock + token] = k[d];
  std::copy_n(v, head_dim, block + head_dim * kKeyBlock + token * PaddedHeadDim(head_dim));
}

// Tokens [first, end) of a block.
void CopyTokens(const float* from, int64_t head_dim, int64_t first, int64_t end, float* to) {
  for (int64_t d = 0; d < head_dim; ++d) {
    std::copy(from + d * kKeyBlock + first, from + d * kKeyBlock + end, to + d * kKeyBlock + first);
  }
  const int64_t values = head_dim * kKeyBlock, padded_dim = PaddedHeadDim(head_dim);
  std::copy(from + values + first * padded_dim, from + values + end * padded_dim,
            to + values + first * padded_dim);
}

// Where the keys of one segment lie, block by block of the position grid.
struct SegmentKeys {
  int64_t context_start = 0;
  int64_t first_block = 0;
  int64_t block_count = 0;
  int64_t first_own_block = 0;  // from here on a block holds rows of the segment and is assembled
  std::vector<int64_t> pages;   // per block that has keys in a page; -1: all its keys are the segment's rows

  int64_t own_blocks() const { return first_block + block_count - first_own_block; }
};

// First and end of what a query at `position` of the segment sees.
AttentionQuery VisibleKeys(const Segment& segment, int64_t context_start, const AttentionMask& mask,
                           int64_t position) {
  AttentionQuery query = {};
  query.first_key = context_start;
  query.end_key = segment.start_position + segment.row_count;
  if (mask.causal) query.end_key = std::min(query.end_key, position + 1);
  if (mask.window > 0) {
    query.first_key = std::max(query.first_key, position - mask.window + 1);
    if (!mask.causal && mask.window < query.end_key - position) query.end_key = position + mask.window;
  }
  return query;
}

absl::StatusOr<SegmentKeys> LocateKeys(const Segment& segment, int64_t context_start,
                                       const AttentionMask& mask, PageTable table, const KeyValuePool& pool) {
  SegmentKeys keys;
  keys.context_start = context_start;
  const int64_t first_key = VisibleKeys(segment, context_start, mask, segment.start_position).first_key;
  const int64_t end = segment.start_position + segment.row_count;
  keys.first_block = first_key / kKeyBlock;
  keys.block_count = (end + kKeyBlock - 1) / kKeyBlock - keys.first_block;
  keys.first_own_block = segment.start_position / kKeyBlock;
  for (int64_t b = keys.first_block; b < keys.first_block + keys.block_count; ++b) {
    int64_t page = -1;
    if (std::max(first_key, b * kKeyBlock) < segment.start_position) {
      DFLASH_ASSIGN_OR_RETURN(page, PageOf("Attention", table, pool, segment.slot, b * kKeyBlock));
    }
    keys.pages.push_back(page);
  }
  return keys;
}

// Fills the blocks that hold rows of the segment, for one KV head: `own` [own_blocks, KeyBlockFloats]. Tokens
// that no query sees stay unwritten.
void AssembleBlocks(const Segment& segment, const SegmentKeys& keys, const ConstMatrixView& k,
                    const ConstMatrixView& v, const KeyValuePool& pool, int64_t head, float* own) {
  const int64_t dim = pool.head_dim, end = segment.start_position + segment.row_count;
  for (int64_t b = keys.first_own_block; b < keys.first_block + keys.block_count; ++b) {
    float* block = own + (b - keys.first_own_block) * KeyBlockFloats(dim);
    const int64_t page = keys.pages[static_cast<size_t>(b - keys.first_block)];
    const int64_t first = std::max(b * kKeyBlock, keys.context_start);
    if (page >= 0 && first < segment.start_position) {
      CopyTokens(BlockOf(pool, page, head), dim, first - b * kKeyBlock,
                 segment.start_position - b * kKeyBlock, block);
    }
    for (int64_t p = std::max<int64_t>(b * kKeyBlock, segment.start_position);
         p < std::min(end, (b + 1) * kKeyBlock); ++p) {
      const int64_t row = segment.first_row + p - segment.start_position;
      WriteToken(k.Row<float>(row) + head * dim, v.Row<float>(row) + head * dim, dim, p % kKeyBlock, block);
    }
  }
}

// All blocks of one KV head, with what AssembleBlocks has made.
void FindBlocks(const SegmentKeys& keys, const KeyValuePool& pool, int64_t head, const float* own,
                std::vector<const float*>& blocks) {
  blocks.clear();
  for (int64_t i = 0; i < keys.block_count; ++i) {
    const int64_t at = keys.first_block + i - keys.first_own_block;
    blocks.push_back(at < 0 ? BlockOf(pool, keys.pages[static_cast<size_t>(i)], head)
                            : own + at * KeyBlockFloats(pool.head_dim));
  }
}

// Queries of rows [first_row, first_row + row_count) of a segment that read one KV head.
struct Part {
  int64_t segment;
  int64_t kv_head;
  int64_t first_row;
  int64_t row_count;
};

// Memory that a thread uses again from call to call.
class Floats {
 public:
  float* AtLeast(int64_t count) {
    if (count > size_) {
      memory_.reset(new float[static_cast<size_t>(count)]);
      size_ = count;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<float[]> memory_;
  int64_t size_ = 0;
};
struct ThreadScratch {
  std::vector<AttentionQuery> queries;
  std::vector<const float*> blocks;
  Floats floats, own;
};

}  // namespace

absl::Status StoreKeyValue(ConstMatrixView k, ConstMatrixView v, SegmentList segments,
                           const int32_t* row_counts, PageTable table, const KeyValuePool& pool,
                           const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckSegments("StoreKeyValue", segments, k.rows, table.slots));
  DFLASH_RETURN_IF_ERROR(CheckRowCounts("StoreKeyValue", segments, row_counts));
  for (int64_t i = 0; i < segments.count; ++i) {
    const Segment& segment = segments.data[i];
    const int64_t end = segment.start_position + RowsOf(segments, row_counts, i);
    for (int64_t p = segment.start_position; p < end; p = (p / kPageTokens + 1) * kPageTokens) {
      DFLASH_RETURN_IF_ERROR(PageOf("StoreKeyValue", table, pool, segment.slot, p).status());
    }
  }
  ParallelFor(stream, pool.kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = 0; i < segments.count; ++i) {
      const Segment& segment = segments.data[i];
      for (int64_t t = 0; t < RowsOf(segments, row_counts, i); ++t) {
        const int64_t position = segment.start_position + t, row = segment.first_row + t;
        const int64_t page = table.pages[segment.slot * table.pages_per_slot + position / kPageTokens];
        for (int64_t head = begin; head < end; ++head) {
          WriteToken(k.Row<float>(row) + head * pool.head_dim, v.Row<float>(row) + head * pool.head_dim,
                     pool.head_dim, position % kPageTokens, BlockOf(pool, page, head));
        }
      }
    }
  });
  return absl::OkStatus();
}

absl::Status StoreKeyValues(const std::vector<KeyValueRows>& layers, SegmentList segments,
                            const int32_t* row_counts, PageTable table, const Stream& stream) {
  for (const KeyValueRows& layer : layers) {
    DFLASH_RETURN_IF_ERROR(
        backend::StoreKeyValue(layer.k, layer.v, segments, row_counts, table, layer.pool, stream));
  }
  return absl::OkStatus();
}

absl::Status LoadKeyValue(const KeyValuePool& pool, PageTable table, int64_t slot, int64_t first_position,
                          MatrixView k, MatrixView v, const Stream&) {
  for (int64_t t = 0; t < k.rows; ++t) {
    const int64_t position = first_position + t, token = position % kPageTokens;
    DFLASH_ASSIGN_OR_RETURN(const int64_t page, PageOf("LoadKeyValue", table, pool, slot, position));
    for (int64_t head = 0; head < pool.kv_heads; ++head) {
      const float* block = BlockOf(pool, page, head);
      float* key = k.Row<float>(t) + head * pool.head_dim;
      for (int64_t d = 0; d < pool.head_dim; ++d) key[d] = block[d * kKeyBlock + token];
      std::copy_n(block + pool.head_dim * kKeyBlock + token * PaddedHeadDim(pool.head_dim), pool.head_dim,
                  v.Row<float>(t) + head * pool.head_dim);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> Attention(ConstMatrixView q, ConstMatrixView block_k, ConstMatrixView block_v,
                               SegmentList segments, const int32_t* context_starts, PageTable table,
                               const KeyValuePool& pool, const AttentionMask& mask, float scale,
                               Phase /*phase*/, MatrixView out, const Stream& stream,
                               ContextWritten /*written*/, ConstMatrixView /*gate*/) {
  DFLASH_RETURN_IF_ERROR(CheckSegments("Attention", segments, q.rows, table.slots));
  const int64_t dim = pool.head_dim;
  const int64_t group = q.cols / (pool.kv_heads * dim);

  std::vector<SegmentKeys> keys(static_cast<size_t>(segments.count));
  int64_t total_rows = 0, most_rows = 0;
  for (int64_t i = 0; i < segments.count; ++i) {
    const Segment& segment = segments.data[i];
    if (segment.row_count == 0) continue;
    int64_t context_start = context_starts == nullptr ? 0 : context_starts[segment.slot];
    if (context_start < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("Attention: context of slot ", segment.slot, " starts at ", context_start));
    }
    context_start = std::min<int64_t>(context_start, segment.start_position);
    DFLASH_ASSIGN_OR_RETURN(keys[static_cast<size_t>(i)],
                            LocateKeys(segment, context_start, mask, table, pool));
    total_rows += segment.row_count;
    most_rows = std::max<int64_t>(most_rows, segment.row_count);
  }

  const auto attend = ForCurrentInstructionSet(AttendScalar, AttendAvx2, AttendAvx512);
  const auto run = [&](const Part& part, const float* own, ThreadScratch& scratch) {
    const Segment& segment = segments.data[part.segment];
    const SegmentKeys& located = keys[static_cast<size_t>(part.segment)];
    scratch.queries.clear();
    for (int64_t t = part.first_row; t < part.first_row + part.row_count; ++t) {
      AttentionQuery query = VisibleKeys(segment, located.context_start, mask, segment.start_position + t);
      for (int64_t head = part.kv_head * group; head < (part.kv_head + 1) * group; ++head) {
        query.q = q.Row<float>(segment.first_row + t) + head * dim;
        query.out = out.Row<float>(segment.first_row + t) + head * dim;
        scratch.queries.push_back(query);
      }
    }
    FindBlocks(located, pool, part.kv_head, own, scratch.blocks);
    const auto count = static_cast<int64_t>(scratch.queries.size());
    attend({.head_dim = dim,
            .scale = scale,
            .queries = scratch.queries.data(),
            .query_count = count,
            .blocks = scratch.blocks.data(),
            .first_block = located.first_block,
            .scratch = scratch.floats.AtLeast(count * AttentionScratchFloats(dim))});
  };
  const int64_t heads = segments.count * pool.kv_heads, threads = ThreadsOf(stream).threads();
  if (heads >= threads && most_rows * group <= kMaxQueriesPerTask) {
    // Enough heads for all threads, and each is small: a thread takes a KV head as a whole, and what it
    // assembles never leaves its caches.
    ParallelFor(stream, heads, 1, [&](int64_t begin, int64_t end) {
      thread_local ThreadScratch scratch;
      for (int64_t item = begin; item < end; ++item) {
        const int64_t i = item / pool.kv_heads, head = item % pool.kv_heads;
        const Segment& segment = segments.data[i];
        if (segment.row_count == 0) continue;
        const SegmentKeys& located = keys[static_cast<size_t>(i)];
        float* const own = scratch.own.AtLeast(located.own_blocks() * KeyBlockFloats(dim));
        AssembleBlocks(segment, located, block_k, block_v, pool, head, own);
        run({i, head, 0, segment.row_count}, own, scratch);
      }
    });
    return false;
  }

  // First the blocks of all heads, then parts of their rows: small enough to feed all threads and large
  // enough to share the reading of a block.
  std::vector<int64_t> own_of(static_cast<size_t>(heads) + 1);
  for (int64_t item = 0; item < heads; ++item) {
    const size_t i = static_cast<size_t>(item / pool.kv_heads);
    const int64_t blocks = segments.data[i].row_count == 0 ? 0 : keys[i].own_blocks();
    own_of[static_cast<size_t>(item) + 1] = own_of[static_cast<size_t>(item)] + blocks * KeyBlockFloats(dim);
  }
  const std::unique_ptr<float[]> own(new float[static_cast<size_t>(own_of.back())]);
  ParallelFor(stream, heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t i = item / pool.kv_heads;
      if (segments.data[i].row_count == 0) continue;
      AssembleBlocks(segments.data[i], keys[static_cast<size_t>(i)], block_k, block_v, pool,
                     item % pool.kv_heads, own.get() + own_of[static_cast<size_t>(item)]);
    }
  });
  const int64_t part_rows = std::clamp<int64_t>(total_rows * pool.kv_heads / (4 * threads), 1,
                                                std::max<int64_t>(1, kMaxQueriesPerTask / group));
  std::vector<Part> parts;
  for (int64_t i = 0; i < segments.count; ++i) {
    const int64_t rows = segments.data[i].row_count;
    for (int64_t head = 0; head < pool.kv_heads; ++head) {
      for (int64_t row = 0; row < rows; row += part_rows) {
        parts.push_back({i, head, row, std::min(part_rows, rows - row)});
      }
    }
  }
  ParallelFor(stream, static_cast<int64_t>(parts.size()), 1, [&](int64_t begin, int64_t end) {
    thread_local ThreadScratch scratch;
    for (int64_t item = begin; item < end; ++item) {
      const Part& part = parts[static_cast<size_t>(item)];
      run(part, own.get() + own_of[static_cast<size_t>(part.segment * pool.kv_heads + part.kv_head)],
          scratch);
    }
  });
  return false;
}

}  // namespace backend
}  // namespace dflash
