// Tokens from logits that lie in parts on the ranks of a group: the local steps of kernels/sampling and what
// moves between them. Every rank gets the same tokens, those of SampleRows over whole rows.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/matrix_view.h"
#include "kernels/device/buffer.h"
#include "kernels/device/stream.h"
#include "kernels/sampling/sampling.h"
#include "kernels/sampling/sharded_sampling.h"
#include "worker/comm/communicator.h"
#include "worker/model/row_processing.h"

namespace dflash {

class ShardedSampler {
 public:
  ShardedSampler() = default;
  // This rank's logits begin with token `first_id`. Communicator and stream are not owned. ResourceExhausted.
  static absl::StatusOr<ShardedSampler> Create(Communicator* communicator, int64_t first_id, int64_t max_rows,
                                               const Stream& stream);

  // As SampleRows. Every rank calls it with the same rows of its own logits and the same other arguments.
  // `reach` covers every row. One all-gather; 18 where the reach is kAll. Errors: those of the communicator;
  // InvalidArgument for more than max_rows.
  absl::Status Sample(ConstMatrixView logits, const SamplingParams* params, const int64_t* positions,
                      int64_t vocabulary, SamplingReach reach, int32_t* tokens);
  // The same for rows whose requests have rules or want log probabilities: the rules are applied to `logits`
  // in place, then the rows are sampled. log_probs: of the tokens, one entry per row, from the logits as they
  // came; empty where they are not wanted. Waits for the stream where there are log probabilities, or rules
  // and several ranks. Errors: also ResourceExhausted; Internal: rank 0's rules are those of other rows.
  absl::Status SampleProcessed(MatrixView logits, const SamplingParams* params, const int64_t* positions,
                               int64_t vocabulary, SamplingReach reach, const RowProcessing& processing,
                               int32_t* tokens, std::vector<TokenLogProbs>* log_probs);
  // Appends log probabilities of given tokens (-1: none) at rows of this rank's logits, and of the `top` best
  // ones beside each. tokens int32 [rows], device memory. Two all-gathers; waits for the stream. Errors as
  // above.
  absl::Status LogProbs(ConstMatrixView logits, int64_t vocabulary, const int32_t* tokens, int32_t top,
                        std::vector<TokenLogProbs>* log_probs);
  // The best token of every row and its probability (kernels/sampling/draft_choice.h); confidences may be
  // null. One all-gather. Errors as above.
  absl::Status ChooseDrafts(ConstMatrixView logits, int64_t vocabulary, int32_t* tokens, float* confidences);

 private:
  // Each rank's lists of `count` keys a row, then all ranks'.
  absl::Status GatherLists(ConstMatrixView logits, int64_t vocabulary, int64_t count);
  absl::Status SampleBySelection(ConstMatrixView logits, const SamplingParams* params,
                                 const int64_t* positions, int64_t vocabulary, int32_t* tokens);
  // Brings rank 0's rules into every rank's device memory.
  absl::StatusOr<LogitRules> ShareRules(const RuleBatch* batch, int64_t rows);
  // Makes room in a buffer that is used now and then.
  absl::Status Grow(Buffer& buffer, int64_t bytes) const;
  // Where this rank writes its part of an array that is gathered over the ranks, in elements of 8 bytes.
  uint64_t* Own(const Buffer& gathered, int64_t elements) const {
    return gathered.As<uint64_t>() + communicator_->rank() * elements;
  }
  absl::Status Gather(const Buffer& gathered, int64_t elements) const;
  absl::Status CheckRows(int64_t rows) const;

  Communicator* communicator_ = nullptr;
  const Stream* stream_ = nullptr;
  int64_t first_id_ = 0;
  int64_t max_rows_ = 0;
  Buffer lists_, sums_, selections_, drafts_;
  Buffer rules_header_, rules_, raw_logits_, best_lists_, log_sums_;
};

}  // namespace dflash
