// Requests as a worker gets them, and the rules that they lay on logits: whatever a request says, it is
// refused or every row of a block has the rules that it would have without drafts, and a row that allows no
// token says so. Input: a Submit (dflash/worker/v1/worker.proto), bytes as on the wire or after a '#' in
// protobuf's text format, a zero byte where that is text, then choices for a walk: of drafts and of what is
// emitted.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/check.h"
#include "dflash/worker/v1/worker.pb.h"
#include "google/protobuf/stubs/logging.h"
#include "google/protobuf/text_format.h"
#include "kernels/device/stream.h"
#include "kernels/sampling/logit_rules.h"
#include "text/tokenizer.h"
#include "worker/engine/constraint_cache.h"
#include "worker/engine/sequence_rules.h"
#include "worker/engine/text_stream.h"
#include "worker/rpc/messages.h"

namespace dflash {
namespace {

constexpr int64_t kVocabulary = 4096;
constexpr size_t kMostSteps = 8;
constexpr float kInf = std::numeric_limits<float>::infinity();

const Tokenizer& TinyTokenizer() {
  static const auto* const tokenizer =
      new Tokenizer(Tokenizer::Load(DFLASHD_SOURCE_DIR "/models/tiny-qwen3.6").value());
  return *tokenizer;
}

const Stream& OneThread() {
  static const auto* const stream = new Stream(Stream::Create({.threads = 1}).value());
  return *stream;
}

// Rows of the same logits, as the rules of each say.
std::vector<std::vector<float>> Processed(const RuleBatch& batch) {
  std::vector<float> logits(batch.rows.size() * kVocabulary);
  for (size_t i = 0; i < logits.size(); ++i)
    logits[i] = static_cast<float>(i % kVocabulary * 2654435761u % 1601) / 100 - 8;
  const MatrixView view(logits.data(), static_cast<int64_t>(batch.rows.size()), kVocabulary);
  DFLASH_CHECK(ProcessLogits({.rows = batch.rows.data(),
                              .edits = batch.edits.data(),
                              .masks = batch.masks.data(),
                              .mask_words = batch.mask_words,
                              .restricts = true},
                             0, kVocabulary, view, OneThread())
                   .ok());
  std::vector<std::vector<float>> rows;
  for (size_t row = 0; row < batch.rows.size(); ++row)
    rows.emplace_back(view.Row<float>(static_cast<int64_t>(row)),
                      view.Row<float>(static_cast<int64_t>(row)) + kVocabulary);
  return rows;
}

void CheckBatch(const RuleBatch& batch) {
  const auto edits = static_cast<int32_t>(batch.edits.size());
  for (const RowRules& row : batch.rows) {
    DFLASH_CHECK(0 <= row.shared_begin && row.shared_begin <= row.shared_end && row.shared_end <= edits);
    DFLASH_CHECK(0 <= row.own_begin && row.own_begin <= row.own_end && row.own_end <= edits);
    DFLASH_CHECK(row.mask < 0 ||
                 static_cast<size_t>((row.mask + 1) * batch.mask_words) <= batch.masks.size());
    DFLASH_CHECK(row.only < kVocabulary);
    for (int32_t i = row.own_begin + 1; i < row.own_end; ++i) {
      DFLASH_CHECK(batch.edits[static_cast<size_t>(i) - 1].id < batch.edits[static_cast<size_t>(i)].id);
    }
  }
}

std::vector<std::vector<float>> RowsOf(const SequenceRules& rules, const std::vector<int32_t>& drafts) {
  RuleBatch batch;
  batch.rows.resize(drafts.size() + 1);
  rules.Describe(drafts, 0, batch);
  CheckBatch(batch);
  return Processed(batch);
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
    return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y);
  });
}

void Walk(const GenerationRequest& request, SequenceRules& rules, std::string_view choices) {
  for (const char byte : choices.substr(0, kMostSteps)) {
    const auto choice = static_cast<uint8_t>(byte);
    if (rules.IsComplete() || rules.HasLostTrack()) return;
    std::vector<float> row = RowsOf(rules, {}).front();
    std::vector<int32_t> allowed;
    for (int32_t token = 0; token < kVocabulary; ++token) {
      if (row[static_cast<size_t>(token)] != -kInf) allowed.push_back(token);
    }
    const bool has_infinite_bias = std::any_of(request.logit_bias.begin(), request.logit_bias.end(),
                                               [](const LogitBias& b) { return !std::isfinite(b.bias); });
    if (!has_infinite_bias) {
      DFLASH_CHECK(rules.AllowsNothing() == allowed.empty(),
                   "what allows nothing says so, and nothing else does");
    }
    if (allowed.empty()) return;
    // Drafts: allowed ones, and some that a drafter would not know to be forbidden.
    std::vector<int32_t> drafts;
    for (uint32_t i = 0; i < choice % 4u; ++i) {
      const uint32_t pick = (choice + 1u) * (i + 1) * 2654435761u;
      drafts.push_back(pick % 5 == 0 ? static_cast<int32_t>(pick % kVocabulary)
                                     : allowed[pick % allowed.size()]);
    }
    const std::vector<std::vector<float>> block = RowsOf(rules, drafts);
    SequenceRules ahead = rules;
    for (size_t i = 0;; ++i) {
      DFLASH_CHECK(SameBits(block[i], RowsOf(ahead, {}).front()), "a row of a block has other rules");
      if (i == drafts.size()) break;
      ahead.Append(drafts[i]);
    }
    rules.Append(allowed[choice / 4u * 37u % allowed.size()]);
  }
}

void Run(const wire::Submit& submit, std::string_view choices) {
  GenerationRequest request = FromMessage(wire::Submit(submit), absl::UnixEpoch());
  const auto text = TextStream::Create(&TinyTokenizer(), request);
  if (!text.ok()) {
    DFLASH_CHECK(text.status().code() == absl::StatusCode::kInvalidArgument,
                 text.status().ToString().c_str());
  }
  static auto* const constraints = new ConstraintCache(&TinyTokenizer());
  const auto constraint = constraints->Find(request.constraint);
  if (!constraint.ok()) {
    const absl::StatusCode code = constraint.status().code();
    DFLASH_CHECK(code == absl::StatusCode::kInvalidArgument || code == absl::StatusCode::kUnimplemented,
                 constraint.status().ToString().c_str());
    return;
  }
  const auto rules = SequenceRules::Create(request, kVocabulary, *constraint);
  if (!rules.ok()) {
    DFLASH_CHECK(rules.status().code() == absl::StatusCode::kInvalidArgument);
    return;
  }
  if (*rules != nullptr) Walk(request, **rules, choices);
}

void Read(std::string_view input) {
  wire::Submit submit;
  if (input.starts_with('#')) {
    const size_t end = std::min(input.find('\0'), input.size());
    google::protobuf::TextFormat::Parser parser;
    parser.AllowPartialMessage(true);
    (void)parser.ParseFromString(std::string(input.substr(1, end - 1)), &submit);  // what could be read
    return Run(submit, input.substr(std::min(end + 1, input.size())));
  }
  if (!submit.ParseFromArray(input.data(), static_cast<int>(input.size()))) return;
  Run(submit, input.substr(input.size() / 2));
}

}  // namespace
}  // namespace dflash

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  google::protobuf::SetLogHandler(nullptr);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  dflash::Read(std::string_view(reinterpret_cast<const char*>(data), size));
  return 0;
}
