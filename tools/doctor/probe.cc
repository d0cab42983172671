#include "tools/doctor/probe.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/status.h"
#include "kernels/device/buffer.h"
#include "worker/decode/decode_rounds.h"
#include "worker/draft/forwarding_drafter.h"
#include "worker/model/state_export.h"

namespace dflash::doctor {
namespace {

// Proposes what it is told; everything else is the drafter's.
class ScriptedDrafter final : public ForwardingDrafter {
 public:
  ScriptedDrafter(Drafter* drafter, const Stream* stream) : ForwardingDrafter(drafter), stream_(stream) {}
  std::vector<int32_t> script;  // of the next proposal, max_drafts() tokens, all of which are wanted

  absl::Status Propose(DecodeStates, const int32_t*, int64_t, const Proposals& proposals) override {
    return CopyToDevice(proposals.tokens, script.data(),
                        static_cast<int64_t>(script.size() * sizeof(int32_t)), *stream_);
  }
  bool is_capturable() const override { return false; }

 private:
  const Stream* stream_;
};

class RunSink final : public RequestSink {
 public:
  explicit RunSink(EngineRun* run) : run_(run) {}
  void OnStarted(const StartedReport& report) override { run_->started = report; }
  void OnTokens(TokensReport report) override {
    run_->tokens.insert(run_->tokens.end(), report.tokens.begin(), report.tokens.end());
    run_->rounds.insert(run_->rounds.end(), report.rounds.begin(), report.rounds.end());
  }
  void OnFinished(const FinishedReport& report) override { run_->finished = report; }
  void OnFailed(const absl::Status& status) override { run_->status = status; }

 private:
  EngineRun* run_;
};

template <typename T>
absl::StatusOr<Buffer> Upload(const std::vector<T>& values, const Stream& stream) {
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
  DFLASH_ASSIGN_OR_RETURN(Buffer buffer, Buffer::Allocate(bytes, stream));
  DFLASH_RETURN_IF_ERROR(CopyToDevice(buffer.data(), values.data(), bytes, stream));
  return buffer;
}

}  // namespace

double EngineRun::tokens_per_round() const {
  if (rounds.empty()) return 0;
  const double accepted =
      std::accumulate(rounds.begin(), rounds.end(), 0.0,
                      [](double sum, const RoundReport& round) { return sum + round.accepted; });
  return 1 + accepted / static_cast<double>(rounds.size());
}

// A sequence's place in the stores.
struct Probe::Slot {
  Slot(SequenceTable* owner, int32_t number) : table(owner), slot(number) {}
  Slot(Slot&& other) noexcept : table(std::exchange(other.table, nullptr)), slot(other.slot) {}
  Slot& operator=(Slot&&) = delete;
  ~Slot() {
    if (table != nullptr) (void)table->Close(slot);  // fails only with the device, which then shows elsewhere
  }
  static absl::StatusOr<Slot> Open(Group& group, int64_t tokens) {
    DFLASH_ASSIGN_OR_RETURN(const int32_t number, group.table->Open());
    Slot slot(group.table.get(), number);
    DFLASH_RETURN_IF_ERROR(group.table->Reserve(number, tokens));
    DFLASH_RETURN_IF_ERROR(group.target->Open(number));
    DFLASH_RETURN_IF_ERROR(group.drafter->Open(number, 0));
    return slot;
  }

  SequenceTable* table;
  int32_t slot;
};

absl::StatusOr<Rows> Probe::Read(ConstMatrixView matrix) const {
  DFLASH_ASSIGN_OR_RETURN(const std::vector<float> values, ActivationsToHost(matrix, *group_->stream));
  return Rows(matrix.rows, matrix.cols, values);
}

absl::Status Probe::Prefill(int32_t slot, const std::vector<int32_t>& tokens, int64_t chunk,
                            SequenceRecord* record) {
  const auto length = static_cast<int64_t>(tokens.size());
  for (int64_t done = 0; done < length;) {
    const int64_t count = std::min(chunk, length - done);
    absl::Status observed;
    if (record != nullptr && done == 0 && leads()) {
      group_->target->set_observer([&](HiddenStateIndex, Phase, ConstMatrixView rows) {
        absl::StatusOr<Rows> values = Read(rows.Rows(0, std::min<int64_t>(rows.rows, kPageTokens)));
        if (!values.ok()) observed = values.status();
        record->hidden_states.push_back(values.ok() ? *std::move(values) : Rows());
      });
    }
    absl::StatusOr<ForwardResult> result = group_->target->Forward(
        {.sequences = {{.slot = slot,
                        .phase = Phase::kPrefill,
                        .start_position = done,
                        .tokens = {tokens.begin() + done, tokens.begin() + done + count},
                        .parents = {},
                        .last_logits = true}}});
    group_->target->set_observer({});
    DFLASH_RETURN_IF_ERROR(result.status());
    DFLASH_RETURN_IF_ERROR(observed);
    if (record != nullptr && leads()) {
      DFLASH_ASSIGN_OR_RETURN(const Rows taps, Read(ConstMatrixView(result->taps).Rows(0, count)));
      record->taps.Append(taps);
      DFLASH_ASSIGN_OR_RETURN(record->last_logits, Read(result->logits));
    }
    DFLASH_RETURN_IF_ERROR(group_->drafter->Ingest(result->taps, {{.slot = slot,
                                                                   .phase = Phase::kPrefill,
                                                                   .first_row = 0,
                                                                   .row_count = count,
                                                                   .start_position = done}}));
    if (record != nullptr && leads()) {
      DFLASH_ASSIGN_OR_RETURN(const Rows features, Read(group_->dflash->last_context_features()));
      record->features.Append(features);
    }
    done += count;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::vector<int32_t>>> Probe::Propose(const std::vector<int32_t>& slots,
                                                                 const std::vector<int32_t>& anchors,
                                                                 const std::vector<int64_t>& positions,
                                                                 float temperature) {
  const Stream& stream = *group_->stream;
  std::vector<DecodeState> states(static_cast<size_t>(group_->table->slots()));
  for (size_t i = 0; i < slots.size(); ++i) {
    DecodeState& state = states[static_cast<size_t>(slots[i])];
    state.anchor = anchors[i];
    state.position = static_cast<int32_t>(positions[i]);
    state.room = 1 << 20;
    state.sampling.temperature = temperature;
    state.sampling.seed = 7;
  }
  const auto count = static_cast<int64_t>(slots.size());
  const int64_t drafts = group_->drafter->max_drafts();
  std::vector<int32_t> tokens(static_cast<size_t>(count * drafts));
  DFLASH_ASSIGN_OR_RETURN(const Buffer state_list, Upload(states, stream));
  DFLASH_ASSIGN_OR_RETURN(const Buffer slot_list, Upload(slots, stream));
  DFLASH_ASSIGN_OR_RETURN(const Buffer proposals, Upload(tokens, stream));
  DFLASH_RETURN_IF_ERROR(group_->drafter->Propose(
      {.data = state_list.As<DecodeState>(), .slots = group_->table->slots()}, slot_list.As<int32_t>(), count,
      {.depth = drafts, .tokens = proposals.As<int32_t>()}));
  DFLASH_RETURN_IF_ERROR(CopyToHost(tokens.data(), proposals.data(), proposals.bytes(), stream));
  std::vector<std::vector<int32_t>> of_slots;
  for (auto row = tokens.begin(); row != tokens.end(); row += drafts)
    of_slots.emplace_back(row, row + drafts);
  return of_slots;
}

absl::StatusOr<std::vector<LayerContext>> Probe::ReadContext(int32_t slot) {
  std::vector<LayerContext> layers;
  if (!leads()) return layers;
  DFLASH_ASSIGN_OR_RETURN(const std::vector<std::vector<float>> stores, group_->dflash->ExportContext(slot));
  const int64_t length = group_->table->lengths(slot).draft_context_end;
  for (size_t i = 0; i + 1 < stores.size(); i += 2) {
    const int64_t cols = length == 0 ? 0 : static_cast<int64_t>(stores[i].size()) / length;
    layers.push_back({.k = Rows(length, cols, stores[i]), .v = Rows(length, cols, stores[i + 1])});
  }
  return layers;
}

absl::StatusOr<SequenceRecord> Probe::RunSequence(const std::vector<int32_t>& tokens, int32_t anchor,
                                                  int64_t chunk) {
  SequenceRecord record;
  record.tokens = tokens;
  record.anchor = anchor;
  DFLASH_ASSIGN_OR_RETURN(const Slot slot, Slot::Open(*group_, record.length() + block_size()));
  DFLASH_RETURN_IF_ERROR(Prefill(slot.slot, tokens, chunk, &record));
  const SequenceLengths& lengths = group_->table->lengths(slot.slot);
  record.context_start = lengths.draft_context_start;
  record.context_end = lengths.draft_context_end;
  DFLASH_ASSIGN_OR_RETURN(record.context, ReadContext(slot.slot));
  DraftPass& pass = record.pass;
  if (leads()) {
    group_->dflash->set_observer([&](DraftStage stage, size_t layer, MatrixView rows) -> absl::Status {
      DFLASH_ASSIGN_OR_RETURN(Rows values, Read(rows));
      if (layer >= pass.layers.size()) pass.layers.resize(layer + 1);
      switch (stage) {
        case DraftStage::kLayerInput:
          pass.residuals.push_back(std::move(values));
          break;
        case DraftStage::kQuery:
          pass.layers[layer].q = std::move(values);
          break;
        case DraftStage::kKey:
          pass.layers[layer].k = std::move(values);
          break;
        case DraftStage::kValue:
          pass.layers[layer].v = std::move(values);
          break;
        case DraftStage::kAttended:
          pass.layers[layer].attended = std::move(values);
          break;
        case DraftStage::kOutput:
          pass.output = std::move(values);
          break;
      }
      return absl::OkStatus();
    });
  }
  const auto proposals = Propose({slot.slot}, {anchor}, {record.length()}, 0);
  if (leads()) group_->dflash->set_observer({});
  DFLASH_RETURN_IF_ERROR(proposals.status());
  pass.proposals = (*proposals)[0];
  if (leads()) {
    pass.layers.resize(pass.residuals.size() - 1);  // the last residual belongs to no layer
    DFLASH_ASSIGN_OR_RETURN(pass.logits, Read(group_->dflash->last_draft_logits()));
  }
  return record;
}

absl::StatusOr<Probe::Together> Probe::RunTogether(const std::vector<const SequenceRecord*>& sequences,
                                                   const Rows& forced_output) {
  Together together;
  std::vector<Slot> open;
  std::vector<int32_t> slots, anchors;
  std::vector<int64_t> positions;
  for (const SequenceRecord* sequence : sequences) {
    DFLASH_ASSIGN_OR_RETURN(Slot slot, Slot::Open(*group_, sequence->length() + block_size()));
    open.push_back(std::move(slot));
    DFLASH_RETURN_IF_ERROR(Prefill(open.back().slot, sequence->tokens, kPageTokens, nullptr));
    slots.push_back(open.back().slot);
    anchors.push_back(sequence->anchor);
    positions.push_back(sequence->length());
  }
  DFLASH_ASSIGN_OR_RETURN(together.proposals, Propose(slots, anchors, positions, 0));
  if (leads()) {
    DFLASH_ASSIGN_OR_RETURN(const Rows logits, Read(group_->dflash->last_draft_logits()));
    const int64_t drafts = block_size() - 1;
    for (size_t i = 0; i < slots.size(); ++i)
      together.logits.push_back(logits.Slice(static_cast<int64_t>(i) * drafts, drafts));
  }
  DFLASH_ASSIGN_OR_RETURN(together.hot, Propose(slots, anchors, positions, 1));
  if (leads()) {
    group_->dflash->set_observer([&](DraftStage stage, size_t, MatrixView rows) -> absl::Status {
      if (stage != DraftStage::kOutput) return absl::OkStatus();
      for (int64_t i = 0; i < rows.rows; ++i) {
        // In the activations' own dtype.
        std::vector<float> wide(forced_output.values.begin(), forced_output.values.end());
        std::vector<bf16> narrow(wide.begin(), wide.end());
        const bool is_f32 = rows.dtype == DType::kF32;
        const void* from = is_f32 ? static_cast<const void*>(wide.data()) : narrow.data();
        DFLASH_RETURN_IF_ERROR(
            CopyToDevice(rows.Rows(i, 1).data, from, rows.cols * SizeOf(rows.dtype), *group_->stream));
      }
      return absl::OkStatus();
    });
  }
  const auto forced = Propose({slots[0]}, {anchors[0]}, {positions[0]}, 0);
  if (leads()) group_->dflash->set_observer({});
  DFLASH_RETURN_IF_ERROR(forced.status());
  together.forced = (*forced)[0];
  return together;
}

absl::StatusOr<RoundsRecord> Probe::RunRounds(const std::vector<int32_t>& prompt, int32_t anchor) {
  RoundsRecord record;
  record.start = static_cast<int64_t>(prompt.size());
  const int64_t block = block_size();
  const int64_t tokens = block * (block + 1) / 2;  // of rounds that accept 0, 1, ..., block - 1 drafts
  const auto start = [&](Drafter* drafter, int32_t slot) -> absl::StatusOr<std::unique_ptr<DecodeRounds>> {
    DFLASH_RETURN_IF_ERROR(Prefill(slot, prompt, kPageTokens, nullptr));
    DFLASH_ASSIGN_OR_RETURN(
        std::unique_ptr<DecodeRounds> rounds,
        DecodeRounds::Create({.vocabulary = group_->vocabulary, .captured = false}, group_->target.get(),
                             drafter, group_->table.get(), *group_->stream));
    DecodeState state;
    state.anchor = anchor;
    state.position = static_cast<int32_t>(record.start);
    state.room = static_cast<int32_t>(tokens + block);
    DFLASH_RETURN_IF_ERROR(rounds->Start(slot, state));
    return rounds;
  };
  const auto round = [](DecodeRounds& rounds, int32_t slot,
                        int64_t max_drafts) -> absl::StatusOr<DecodeRounds::SequenceOutcome> {
    DFLASH_RETURN_IF_ERROR(rounds.Enqueue({{.slot = slot, .max_drafts = max_drafts}}));
    DFLASH_ASSIGN_OR_RETURN(DecodeRounds::Outcome outcome, rounds.Collect());
    return std::move(outcome.sequences[0]);
  };

  DFLASH_ASSIGN_OR_RETURN(const Slot plain, Slot::Open(*group_, record.start + tokens + block));
  DFLASH_ASSIGN_OR_RETURN(std::unique_ptr<DecodeRounds> plain_rounds,
                          start(group_->drafter.get(), plain.slot));
  while (static_cast<int64_t>(record.continuation.size()) < tokens) {
    DFLASH_ASSIGN_OR_RETURN(const DecodeRounds::SequenceOutcome outcome, round(*plain_rounds, plain.slot, 0));
    if (outcome.emitted.size() != 1 || outcome.emitted[0] < 0)
      return absl::InternalError("a plain round of the target gave no token");
    record.continuation.push_back(outcome.emitted[0]);
  }
  plain_rounds.reset();

  ScriptedDrafter scripted(group_->drafter.get(), group_->stream.get());
  DFLASH_ASSIGN_OR_RETURN(const Slot fast, Slot::Open(*group_, record.start + tokens + block));
  DFLASH_ASSIGN_OR_RETURN(std::unique_ptr<DecodeRounds> rounds, start(&scripted, fast.slot));
  int64_t known = 0;  // tokens of the continuation that are emitted
  for (int64_t planned = 0; planned < block; ++planned) {
    scripted.script.clear();
    for (int64_t depth = 0; depth + 1 < block; ++depth) {
      const auto next = static_cast<size_t>(std::min(known + depth, tokens - 1));
      const int32_t right = record.continuation[next];
      scripted.script.push_back(depth < planned ? right
                                                : static_cast<int32_t>((right + 1) % group_->vocabulary));
    }
    ScriptedRound entry;
    entry.planned = planned;
    entry.anchor_position = record.start + known;
    DFLASH_ASSIGN_OR_RETURN(const DecodeRounds::SequenceOutcome outcome,
                            round(*rounds, fast.slot, block - 1));
    entry.rows = outcome.result.rows;
    entry.emitted = outcome.result.emitted;
    entry.accepted = outcome.result.accepted;
    entry.position = outcome.result.position;
    entry.tokens = outcome.emitted;
    record.speculative.insert(record.speculative.end(), entry.tokens.begin(), entry.tokens.end());
    record.rounds.push_back(std::move(entry));
    known = std::min(known + static_cast<int64_t>(outcome.emitted.size()), tokens - 1);
  }
  rounds.reset();
  DFLASH_ASSIGN_OR_RETURN(record.plain_context, ReadContext(plain.slot));
  DFLASH_ASSIGN_OR_RETURN(record.speculative_context, ReadContext(fast.slot));
  DFLASH_ASSIGN_OR_RETURN(record.plain_state, group_->target->ExportState(plain.slot));
  DFLASH_ASSIGN_OR_RETURN(record.speculative_state, group_->target->ExportState(fast.slot));
  return record;
}

absl::StatusOr<Probe::VerifyRecord> Probe::RunVerify(const std::vector<int32_t>& prompt,
                                                     const std::vector<int32_t>& tokens) {
  VerifyRecord record;
  const auto length = static_cast<int64_t>(prompt.size());
  const auto rows = static_cast<int64_t>(tokens.size());
  for (const int64_t at_once : {rows, int64_t{1}}) {
    Rows& logits = at_once == rows ? record.together : record.alone;
    DFLASH_ASSIGN_OR_RETURN(const Slot slot, Slot::Open(*group_, length + rows));
    DFLASH_RETURN_IF_ERROR(Prefill(slot.slot, prompt, kPageTokens, nullptr));
    for (int64_t done = 0; done < rows; done += at_once) {
      DFLASH_ASSIGN_OR_RETURN(
          const ForwardResult result,
          group_->target->Forward(
              {.sequences = {{.slot = slot.slot,
                              .phase = Phase::kVerify,
                              .start_position = length + done,
                              .tokens = {tokens.begin() + done, tokens.begin() + done + at_once},
                              .parents = {},
                              .last_logits = false}}}));
      if (leads()) {
        DFLASH_ASSIGN_OR_RETURN(const Rows more, Read(result.logits));
        logits.Append(more);
      }
      DFLASH_RETURN_IF_ERROR(group_->target->Commit({{.slot = slot.slot, .rows = at_once}}));
    }
  }
  return record;
}

absl::StatusOr<Probe::EngineRuns> Probe::RunEngine(std::vector<Wave> waves, int64_t max_prefill_tokens,
                                                   int64_t pages) {
  class Recorder final : public StepObserver {
   public:
    explicit Recorder(EngineRuns* runs) : runs_(runs) {}
    void OnStep(const StepReport& report, const EngineGauges&) override {
      runs_->preemptions += report.preemptions;
      runs_->decoded.insert(runs_->decoded.end(), report.rounds.begin(), report.rounds.end());
    }

   private:
    EngineRuns* runs_;
  };
  EngineRuns runs;
  Recorder observer(&runs);
  // Sequences that do nothing hold the other pages.
  std::vector<Slot> idle;
  while (pages > 0 && group_->table->free_pages() > pages) {
    const int64_t tokens = std::min((group_->table->free_pages() - pages) * kPageTokens,
                                    group_->max_context_tokens / kPageTokens * kPageTokens);
    DFLASH_ASSIGN_OR_RETURN(Slot slot, Slot::Open(*group_, tokens));
    idle.push_back(std::move(slot));
  }
  DFLASH_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine, group_->MakeEngine(max_prefill_tokens, &observer));
  for (Wave& wave : waves) {
    std::vector<EngineRun>& of_wave = runs.waves.emplace_back(wave.size());
    for (size_t i = 0; i < wave.size(); ++i)
      engine->Submit(std::move(wave[i]), std::make_unique<RunSink>(&of_wave[i]));
    for (;;) {
      DFLASH_ASSIGN_OR_RETURN(const bool worked, engine->Step());
      if (!worked) break;
    }
    for (const EngineRun& run : of_wave) DFLASH_RETURN_IF_ERROR(run.status);
  }
  return runs;
}

}  // namespace dflash::doctor
