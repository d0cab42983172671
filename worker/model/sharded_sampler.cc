#include "worker/model/sharded_sampler.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/sampling/draft_choice.h"
#include "kernels/sampling/log_probs.h"

namespace dflash {
namespace {

// Where the parts of a RuleBatch lie in one piece of device memory.
struct RulesHeader {
  int64_t rows = 0, edits = 0, mask_words = 0, masks = 0, restricts = 0;

  static int64_t Padded(int64_t bytes) { return (bytes + 15) / 16 * 16; }
  int64_t EditsOffset() const { return Padded(rows * int64_t{sizeof(RowRules)}); }
  int64_t MasksOffset() const { return EditsOffset() + Padded(edits * int64_t{sizeof(LogitEdit)}); }
  int64_t bytes() const { return MasksOffset() + masks * mask_words * int64_t{sizeof(uint32_t)}; }
};

RulesHeader HeaderOf(const RuleBatch& batch) {
  RulesHeader header = {.rows = static_cast<int64_t>(batch.rows.size()),
                        .edits = static_cast<int64_t>(batch.edits.size()),
                        .mask_words = batch.mask_words};
  if (batch.mask_words > 0) header.masks = static_cast<int64_t>(batch.masks.size()) / batch.mask_words;
  header.restricts = std::any_of(batch.rows.begin(), batch.rows.end(),
                                 [](const RowRules& row) { return row.mask >= 0 || row.only >= 0; });
  return header;
}

template <typename T>
void Place(const std::vector<T>& values, int64_t offset, std::vector<char>& bytes) {
  if (!values.empty()) std::memcpy(bytes.data() + offset, values.data(), values.size() * sizeof(T));
}

}  // namespace

absl::StatusOr<ShardedSampler> ShardedSampler::Create(Communicator* communicator, int64_t first_id,
                                                      int64_t max_rows, const Stream& stream) {
  ShardedSampler sampler;
  sampler.communicator_ = communicator;
  sampler.stream_ = &stream;
  sampler.first_id_ = first_id;
  sampler.max_rows_ = max_rows;
  const int64_t rows = communicator->size() * max_rows;
  DFLASH_ASSIGN_OR_RETURN(sampler.drafts_, Buffer::Allocate(rows * int64_t{sizeof(DraftCandidate)}, stream));
  if (communicator->size() == 1) return sampler;
  DFLASH_ASSIGN_OR_RETURN(sampler.lists_,
                          Buffer::Allocate(rows * kMaxListed * int64_t{sizeof(CandidateKey)}, stream));
  DFLASH_ASSIGN_OR_RETURN(sampler.sums_,
                          Buffer::Allocate(rows * kDigits * int64_t{sizeof(uint64_t)}, stream));
  DFLASH_ASSIGN_OR_RETURN(sampler.selections_,
                          Buffer::Allocate(max_rows * int64_t{sizeof(RowSelection)}, stream));
  return sampler;
}

absl::Status ShardedSampler::CheckRows(int64_t rows) const {
  if (rows <= max_rows_) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("sampling of ", rows, " rows, at most ", max_rows_));
}

absl::Status ShardedSampler::Gather(const Buffer& gathered, int64_t elements) const {
  return communicator_->AllGather(Own(gathered, elements), gathered.data(),
                                  elements * int64_t{sizeof(uint64_t)}, *stream_);
}

absl::Status ShardedSampler::GatherLists(ConstMatrixView logits, int64_t vocabulary, int64_t count) {
  const int64_t elements = logits.rows * count;
  DFLASH_RETURN_IF_ERROR(ListBest(logits, first_id_, vocabulary, count, Own(lists_, elements), *stream_));
  return Gather(lists_, elements);
}

absl::Status ShardedSampler::ChooseDrafts(ConstMatrixView logits, int64_t vocabulary, int32_t* tokens,
                                          float* confidences) {
  DFLASH_RETURN_IF_ERROR(CheckRows(logits.rows));
  auto* candidates = drafts_.As<DraftCandidate>();
  DraftCandidate* own = candidates + communicator_->rank() * logits.rows;
  DFLASH_RETURN_IF_ERROR(ListDrafts(logits, first_id_, vocabulary, own, *stream_));
  if (communicator_->size() > 1) {
    DFLASH_RETURN_IF_ERROR(
        communicator_->AllGather(own, candidates, logits.rows * int64_t{sizeof(DraftCandidate)}, *stream_));
  }
  return dflash::ChooseDrafts(candidates, communicator_->size(), logits.rows, tokens, confidences, *stream_);
}

absl::Status ShardedSampler::Sample(ConstMatrixView logits, const SamplingParams* params,
                                    const int64_t* positions, int64_t vocabulary, SamplingReach reach,
                                    int32_t* tokens) {
  if (communicator_->size() == 1) return SampleRows(logits, params, positions, vocabulary, tokens, *stream_);
  DFLASH_RETURN_IF_ERROR(CheckRows(logits.rows));
  if (reach == SamplingReach::kAll) return SampleBySelection(logits, params, positions, vocabulary, tokens);
  const int64_t count = reach == SamplingReach::kBest ? 1 : kMaxListed;
  DFLASH_RETURN_IF_ERROR(GatherLists(logits, vocabulary, count));
  return SampleFromLists(lists_.As<CandidateKey>(), communicator_->size(), logits.rows, count, params,
                         positions, tokens, *stream_);
}

absl::Status ShardedSampler::SampleProcessed(MatrixView logits, const SamplingParams* params,
                                             const int64_t* positions, int64_t vocabulary,
                                             SamplingReach reach, const RowProcessing& processing,
                                             int32_t* tokens, std::vector<TokenLogProbs>* log_probs) {
  log_probs->clear();
  ConstMatrixView raw = logits;
  if (processing.has_rules) {
    DFLASH_ASSIGN_OR_RETURN(const LogitRules rules, ShareRules(processing.rules, logits.rows));
    if (processing.log_probs > 0) {
      DFLASH_RETURN_IF_ERROR(Grow(raw_logits_, logits.rows * logits.cols * int64_t{sizeof(float)}));
      const MatrixView copy(raw_logits_.As<float>(), logits.rows, logits.cols);
      DFLASH_RETURN_IF_ERROR(CopyRows(logits, copy, *stream_));
      raw = copy;
    }
    DFLASH_RETURN_IF_ERROR(ProcessLogits(rules, first_id_, vocabulary, logits, *stream_));
  }
  DFLASH_RETURN_IF_ERROR(Sample(logits, params, positions, vocabulary, reach, tokens));
  if (processing.log_probs == 0) return absl::OkStatus();
  return LogProbs(raw, vocabulary, tokens, std::min(processing.log_probs - 1, kMaxTopLogProbs), log_probs);
}

absl::Status ShardedSampler::Grow(Buffer& buffer, int64_t bytes) const {
  if (buffer.bytes() >= bytes) return absl::OkStatus();
  DFLASH_RETURN_IF_ERROR(stream_->Synchronize());  // nothing may still use the old one
  buffer = Buffer();
  DFLASH_ASSIGN_OR_RETURN(buffer, Buffer::Allocate(bytes + bytes / 2, *stream_));
  return absl::OkStatus();
}

absl::StatusOr<LogitRules> ShardedSampler::ShareRules(const RuleBatch* batch, int64_t rows) {
  const bool is_shared = communicator_->size() > 1;
  if (batch == nullptr && communicator_->rank() == 0) return absl::InternalError("rank 0 has no rules");
  RulesHeader header;
  if (batch != nullptr) header = HeaderOf(*batch);
  if (is_shared) {
    constexpr int64_t kBytes = sizeof(RulesHeader);
    DFLASH_RETURN_IF_ERROR(Grow(rules_header_, kBytes));
    DFLASH_RETURN_IF_ERROR(CopyToDevice(rules_header_.data(), &header, kBytes, *stream_));
    DFLASH_RETURN_IF_ERROR(communicator_->Broadcast(rules_header_.data(), kBytes, 0, *stream_));
    DFLASH_RETURN_IF_ERROR(CopyToHost(&header, rules_header_.data(), kBytes, *stream_));
  }
  if (header.rows != rows) {
    return absl::InternalError(absl::StrCat("rules of ", header.rows, " rows for ", rows, " rows of logits"));
  }
  DFLASH_RETURN_IF_ERROR(Grow(rules_, header.bytes()));
  if (communicator_->rank() == 0) {
    std::vector<char> bytes(static_cast<size_t>(header.bytes()));
    Place(batch->rows, 0, bytes);
    Place(batch->edits, header.EditsOffset(), bytes);
    Place(batch->masks, header.MasksOffset(), bytes);
    DFLASH_RETURN_IF_ERROR(CopyToDevice(rules_.data(), bytes.data(), header.bytes(), *stream_));
  }
  if (is_shared) DFLASH_RETURN_IF_ERROR(communicator_->Broadcast(rules_.data(), header.bytes(), 0, *stream_));
  const char* data = rules_.As<char>();
  return LogitRules{
      .rows = reinterpret_cast<const RowRules*>(data),
      .edits = reinterpret_cast<const LogitEdit*>(data + header.EditsOffset()),
      .masks = header.masks == 0 ? nullptr : reinterpret_cast<const uint32_t*>(data + header.MasksOffset()),
      .mask_words = header.mask_words,
      .restricts = header.restricts != 0};
}

absl::Status ShardedSampler::LogProbs(ConstMatrixView logits, int64_t vocabulary, const int32_t* tokens,
                                      int32_t top, std::vector<TokenLogProbs>* log_probs) {
  const int64_t parts = communicator_->size(), rows = logits.rows;
  constexpr int64_t kSumBytes = sizeof(LogSum), kKeyBytes = sizeof(CandidateKey);
  DFLASH_RETURN_IF_ERROR(Grow(log_sums_, parts * rows * kSumBytes));
  DFLASH_RETURN_IF_ERROR(Grow(best_lists_, parts * rows * std::max(top, 1) * kKeyBytes));
  LogSum* sums = log_sums_.As<LogSum>() + communicator_->rank() * rows;
  CandidateKey* lists = best_lists_.As<CandidateKey>() + communicator_->rank() * rows * top;
  DFLASH_RETURN_IF_ERROR(SumRows(logits, first_id_, vocabulary, tokens, sums, *stream_));
  if (top > 0) DFLASH_RETURN_IF_ERROR(ListBest(logits, first_id_, vocabulary, top, lists, *stream_));
  if (parts > 1) {
    DFLASH_RETURN_IF_ERROR(communicator_->AllGather(sums, log_sums_.data(), rows * kSumBytes, *stream_));
    if (top > 0) {
      DFLASH_RETURN_IF_ERROR(
          communicator_->AllGather(lists, best_lists_.data(), rows * top * kKeyBytes, *stream_));
    }
  }
  std::vector<LogSum> all_sums(static_cast<size_t>(parts * rows));
  std::vector<CandidateKey> all_lists(static_cast<size_t>(parts * rows * top));
  DFLASH_RETURN_IF_ERROR(CopyToHost(all_sums.data(), log_sums_.data(), parts * rows * kSumBytes, *stream_));
  if (top > 0) {
    DFLASH_RETURN_IF_ERROR(
        CopyToHost(all_lists.data(), best_lists_.data(), parts * rows * top * kKeyBytes, *stream_));
  }
  for (int64_t r = 0; r < rows; ++r) {
    const RowLogProbs row = MergeLogSums(&all_sums[static_cast<size_t>(r)], parts, rows);
    TokenLogProbs& entry = log_probs->emplace_back();
    entry.log_prob = static_cast<float>(row.token);
    std::vector<CandidateKey> keys;
    for (int64_t part = 0; part < parts; ++part) {
      const auto list = all_lists.begin() + (part * rows + r) * top;
      keys.insert(keys.end(), list, list + top);
    }
    std::sort(keys.begin(), keys.end());
    for (int32_t i = 0; i < top && keys[static_cast<size_t>(i)] != kNoCandidate; ++i) {
      const CandidateKey key = keys[static_cast<size_t>(i)];
      entry.top.push_back({.token = TokenOf(key),
                           .log_prob = static_cast<float>(static_cast<double>(LogitOf(key)) - row.total)});
    }
  }
  return absl::OkStatus();
}

absl::Status ShardedSampler::SampleBySelection(ConstMatrixView logits, const SamplingParams* params,
                                               const int64_t* positions, int64_t vocabulary,
                                               int32_t* tokens) {
  const int64_t parts = communicator_->size();
  const int64_t rows = logits.rows;
  auto* selections = selections_.As<RowSelection>();
  DFLASH_RETURN_IF_ERROR(GatherLists(logits, vocabulary, 1));
  DFLASH_RETURN_IF_ERROR(BeginSelection(lists_.As<CandidateKey>(), parts, rows, selections, *stream_));
  for (SamplingFilter filter : {SamplingFilter::kTopK, SamplingFilter::kTopP}) {
    for (int shift = 56; shift >= 0; shift -= 8) {
      DFLASH_RETURN_IF_ERROR(CountDigits(logits, first_id_, vocabulary, params, filter, shift, selections,
                                         Own(sums_, rows * kDigits), *stream_));
      DFLASH_RETURN_IF_ERROR(Gather(sums_, rows * kDigits));
      DFLASH_RETURN_IF_ERROR(
          ChooseDigit(sums_.As<uint64_t>(), parts, rows, params, filter, shift, selections, *stream_));
    }
  }
  DFLASH_RETURN_IF_ERROR(DrawBelowLimit(logits, first_id_, vocabulary, params, positions, selections,
                                        Own(lists_, rows), *stream_));
  DFLASH_RETURN_IF_ERROR(Gather(lists_, rows));
  return ChooseTokens(lists_.As<CandidateKey>(), parts, rows, params, selections, tokens, *stream_);
}

}  // namespace dflash
