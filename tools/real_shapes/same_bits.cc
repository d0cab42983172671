#include "tools/real_shapes/same_bits.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "kernels/device/buffer.h"
#include "kernels/random_weights/random_element.h"

namespace dflash {
namespace {

using Rows = std::vector<std::vector<float>>;  // logits

class Company {
 public:
  explicit Company(Group& group) : group_(group), vocabulary_(group.target->config().vocab_size) {}

  std::vector<int32_t> Tokens(int64_t first, int64_t count, uint64_t sequence) const {
    std::vector<int32_t> tokens;
    for (int64_t i = first; i < first + count; ++i) {
      const uint64_t bits = MixBits((sequence << 32) + static_cast<uint64_t>(i) + 1);
      tokens.push_back(static_cast<int32_t>(bits % static_cast<uint64_t>(vocabulary_)));
    }
    return tokens;
  }

  absl::StatusOr<int32_t> Open(int64_t tokens) {
    DFLASH_ASSIGN_OR_RETURN(const int32_t slot, group_.table->Open());
    DFLASH_RETURN_IF_ERROR(group_.table->Reserve(slot, tokens));
    DFLASH_RETURN_IF_ERROR(group_.target->Open(slot));
    return slot;
  }

  SequenceRows Next(int32_t slot, Phase phase, int64_t count, uint64_t sequence,
                    bool last_logits = false) const {
    SequenceRows rows;
    rows.slot = slot;
    rows.phase = phase;
    rows.start_position = group_.table->lengths(slot).target_kv;
    rows.tokens = Tokens(rows.start_position, count, sequence);
    rows.last_logits = last_logits;
    return rows;
  }

  // One step; verified sequences commit all rows. Logits by sequence of the batch.
  absl::StatusOr<std::vector<Rows>> Step(const std::vector<SequenceRows>& sequences) {
    DFLASH_ASSIGN_OR_RETURN(const ForwardResult result, group_.target->Forward({.sequences = sequences}));
    std::vector<Rows> logits(sequences.size());
    std::vector<Target::Accepted> accepted;
    for (size_t i = 0; i < sequences.size(); ++i) {
      for (int64_t row = 0; row < result.logits_rows[i].count; ++row) {
        std::vector<float>& values = logits[i].emplace_back(static_cast<size_t>(vocabulary_));
        DFLASH_RETURN_IF_ERROR(CopyToHost(values.data(),
                                          result.logits.Rows(result.logits_rows[i].first + row, 1).data,
                                          vocabulary_ * int64_t{sizeof(float)}, *group_.stream));
      }
      if (sequences[i].phase == Phase::kVerify) {
        accepted.push_back(
            {.slot = sequences[i].slot, .rows = static_cast<int64_t>(sequences[i].tokens.size())});
      }
    }
    if (!accepted.empty()) DFLASH_RETURN_IF_ERROR(group_.target->Commit(accepted));
    return logits;
  }

  absl::StatusOr<Rows> Prefill(int32_t slot, int64_t prompt, int64_t step_rows, uint64_t sequence) {
    Rows last;
    while (group_.table->lengths(slot).target_kv < prompt) {
      const int64_t left = prompt - group_.table->lengths(slot).target_kv;
      DFLASH_ASSIGN_OR_RETURN(
          std::vector<Rows> logits,
          Step({Next(slot, Phase::kPrefill, std::min(left, step_rows), sequence, left <= step_rows)}));
      last = std::move(logits[0]);
    }
    return last;
  }

  void Check(const std::string& what, const Rows& rows, const Rows& alone, size_t first) {
    size_t equal = 0;
    for (size_t row = 0; row < rows.size(); ++row) {
      const std::vector<float>& expected = alone[first + row];
      equal += std::memcmp(rows[row].data(), expected.data(), expected.size() * sizeof(float)) == 0;
    }
    std::printf("%2zu of %2zu rows bit-equal: %s\n", equal, rows.size(), what.c_str());
    std::fflush(stdout);
    all_equal_ = all_equal_ && equal == rows.size() && !rows.empty();
  }
  bool all_equal() const { return all_equal_; }

 private:
  Group& group_;
  const int64_t vocabulary_;
  bool all_equal_ = true;
};

}  // namespace

absl::Status CompareCompany(Group& group, int64_t prompt) {
  Company company(group);
  constexpr int64_t kBlock = 16;
  const int64_t tokens = prompt + 2 * kBlock;
  const int64_t other_lengths[] = {37, std::max<int64_t>(1, prompt - 100)};
  std::vector<int32_t> slots;
  Rows last_alone;
  // The prompt in steps of all rows, one chunk, three, five, seven and again all.
  int index = 0;
  for (const int64_t step_rows : {prompt, int64_t{64}, int64_t{192}, int64_t{320}, int64_t{448}, prompt}) {
    DFLASH_ASSIGN_OR_RETURN(slots.emplace_back(), company.Open(tokens));
    DFLASH_ASSIGN_OR_RETURN(const Rows last, company.Prefill(slots.back(), prompt, step_rows, 0));
    if (index++ == 0) last_alone = last;
    company.Check(absl::StrCat("last row of a prompt of ", prompt, " in steps of ", step_rows), last,
                  last_alone, 0);
  }
  for (size_t i = 0; i < std::size(other_lengths); ++i) {
    DFLASH_ASSIGN_OR_RETURN(slots.emplace_back(), company.Open(tokens));
    DFLASH_RETURN_IF_ERROR(company.Prefill(slots.back(), other_lengths[i], 448, i + 1).status());
  }
  const auto verify = [&](size_t slot, int64_t rows, uint64_t sequence = 0) {
    return company.Next(slots[slot], Phase::kVerify, rows, sequence);
  };

  DFLASH_ASSIGN_OR_RETURN(const std::vector<Rows> alone_step, company.Step({verify(0, kBlock)}));
  const Rows& alone = alone_step[0];
  Rows one_by_one;
  for (int64_t row = 0; row < kBlock; ++row) {
    DFLASH_ASSIGN_OR_RETURN(const std::vector<Rows> step, company.Step({verify(1, 1)}));
    one_by_one.push_back(step[0][0]);
  }
  company.Check("a block row by row, as plain decoding does", one_by_one, alone, 0);

  DFLASH_ASSIGN_OR_RETURN(const std::vector<Rows> many, company.Step({verify(6, kBlock, 1), verify(2, kBlock),
                                                                      verify(7, kBlock, 2), verify(3, 5)}));
  company.Check("a block beside three other sequences, 53 rows in all", many[1], alone, 0);
  company.Check("the first 5 rows of a block in the same step", many[3], alone, 0);
  DFLASH_ASSIGN_OR_RETURN(const std::vector<Rows> rest, company.Step({verify(3, kBlock - 5)}));
  company.Check("the other 11 rows, after those 5 have been committed", rest[0], alone, 5);

  // Another prompt in the same step: rows of the two phases never share a product.
  DFLASH_RETURN_IF_ERROR(group.table->Close(slots[0]));
  DFLASH_ASSIGN_OR_RETURN(slots[0], company.Open(tokens));
  DFLASH_ASSIGN_OR_RETURN(
      const std::vector<Rows> mixed,
      company.Step(
          {company.Next(slots[0], Phase::kPrefill, std::min<int64_t>(prompt, 256), 3), verify(4, kBlock)}));
  company.Check("a block in one step with a prompt", mixed[1], alone, 0);
  DFLASH_ASSIGN_OR_RETURN(
      const std::vector<Rows> four,
      company.Step({verify(5, kBlock), verify(6, kBlock, 1), verify(7, kBlock, 2), verify(4, kBlock)}));
  company.Check("a block among 64 rows", four[0], alone, 0);
  return company.all_equal() ? absl::OkStatus() : absl::InternalError("rows depend on their company");
}

}  // namespace dflash
