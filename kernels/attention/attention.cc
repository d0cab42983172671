#include "kernels/attention/attention.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/attention/attention_backend.h"
#include "kernels/device/buffer.h"
#include "kernels/device/describe.h"
#include "kernels/swiglu/swiglu.h"

namespace dflash {
namespace {

// k and v of `rows` rows that fit the pool.
absl::Status CheckKeyValue(const char* operation, const KeyValuePool& pool, PageTable table,
                           ConstMatrixView k, ConstMatrixView v, int64_t rows) {
  if (pool.page_count < 0 || pool.kv_heads < 1 || pool.head_dim < 1 || table.slots < 0 ||
      table.pages_per_slot < 0) {
    return absl::InvalidArgumentError(absl::StrCat(operation, ": pool of ", pool.page_count, " pages x ",
                                                   pool.kv_heads, " heads x ", pool.head_dim, ", table of ",
                                                   table.slots, " slots x ", table.pages_per_slot, " pages"));
  }
  const auto fits = [&](const ConstMatrixView& view) {
    return IsWellFormed(view) && view.dtype == ActivationDType() && view.rows == rows &&
           view.cols == pool.kv_heads * pool.head_dim;
  };
  if (!fits(k) || !fits(v)) {
    return absl::InvalidArgumentError(absl::StrCat(operation, ": keys ", Describe(k), ", values ",
                                                   Describe(v), " for ", rows, " rows of ", pool.kv_heads,
                                                   " heads x ", pool.head_dim));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status StoreKeyValue(ConstMatrixView k, ConstMatrixView v, SegmentList segments,
                           const int32_t* row_counts, PageTable table, const KeyValuePool& pool,
                           const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckKeyValue("StoreKeyValue", pool, table, k, v, k.rows));
  DFLASH_RETURN_IF_ERROR(CheckSegmentList("StoreKeyValue", segments));
  return backend::StoreKeyValue(k, v, segments, row_counts, table, pool, stream);
}

absl::Status StoreKeyValues(const std::vector<KeyValueRows>& layers, SegmentList segments,
                            const int32_t* row_counts, PageTable table, const Stream& stream) {
  for (const KeyValueRows& layer : layers) {
    DFLASH_RETURN_IF_ERROR(
        CheckKeyValue("StoreKeyValues", layer.pool, table, layer.k, layer.v, layers[0].k.rows));
  }
  DFLASH_RETURN_IF_ERROR(CheckSegmentList("StoreKeyValues", segments));
  return backend::StoreKeyValues(layers, segments, row_counts, table, stream);
}

absl::Status LoadKeyValue(const KeyValuePool& pool, PageTable table, int64_t slot, int64_t first_position,
                          MatrixView k, MatrixView v, const Stream& stream) {
  DFLASH_RETURN_IF_ERROR(CheckKeyValue("LoadKeyValue", pool, table, k, v, k.rows));
  if (slot < 0 || slot >= table.slots || first_position < 0 ||
      k.rows > table.pages_per_slot * kPageTokens - first_position) {
    return absl::InvalidArgumentError(absl::StrCat("LoadKeyValue: ", k.rows, " positions from ",
                                                   first_position, " of slot ", slot, ", of ", table.slots,
                                                   " slots x ", table.pages_per_slot, " pages"));
  }
  return backend::LoadKeyValue(pool, table, slot, first_position, k, v, stream);
}

absl::Status Attention(ConstMatrixView q, ConstMatrixView block_k, ConstMatrixView block_v,
                       SegmentList segments, const int32_t* context_starts, PageTable table,
                       const KeyValuePool& pool, const AttentionMask& mask, float scale, Phase phase,
                       MatrixView out, const Stream& stream, ContextWritten written, ConstMatrixView gate) {
  DFLASH_RETURN_IF_ERROR(CheckKeyValue("Attention", pool, table, block_k, block_v, q.rows));
  DFLASH_RETURN_IF_ERROR(CheckSegmentList("Attention", segments));
  if (!IsWellFormed(q) || q.dtype != ActivationDType() || q.cols == 0 ||
      q.cols % (pool.kv_heads * pool.head_dim) != 0 || !IsWellFormed(out) || out.dtype != ActivationDType() ||
      out.rows != q.rows || out.cols != q.cols || mask.window < 0 || !(scale > 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("Attention: queries ", Describe(q), ", output ", Describe(out), ", ", pool.kv_heads,
                     " KV heads x ", pool.head_dim, ", window ", mask.window, ", scale ", scale));
  }
  const bool has_gate = gate.data != nullptr;
  if (has_gate && (!IsWellFormed(gate) || gate.dtype != ActivationDType() || gate.rows != q.rows ||
                   gate.cols != q.cols)) {
    return absl::InvalidArgumentError(
        absl::StrCat("Attention: queries ", Describe(q), ", gate ", Describe(gate)));
  }
  DFLASH_ASSIGN_OR_RETURN(const bool is_gated,
                          backend::Attention(q, block_k, block_v, segments, context_starts, table, pool, mask,
                                             scale, phase, out, stream, written, gate));
  return has_gate && !is_gated ? SigmoidGate(out, gate, stream) : absl::OkStatus();
}

}  // namespace dflash
