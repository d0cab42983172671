#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "kernels/device/graph.h"
#include "tools/dflash_bench/timing.h"
#include "tools/rank_bench/rank.h"
#include "worker/model/state_export.h"

namespace dflash::bench {
namespace {

constexpr int64_t kPromptRows = 17;
constexpr int64_t kVerifyRows = 16;

std::vector<int32_t> Tokens(int64_t count, int64_t vocabulary, int64_t seed) {
  std::vector<int32_t> tokens;
  uint64_t state = static_cast<uint64_t>(seed) * 2654435761u + 17;
  for (int64_t i = 0; i < count; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    tokens.push_back(static_cast<int32_t>((state >> 33) % static_cast<uint64_t>(vocabulary)));
  }
  return tokens;
}

// A slot with room for `tokens` tokens; gives it back.
class Slot {
 public:
  static absl::StatusOr<Slot> Open(const Group& group, int64_t tokens) {
    DFLASH_ASSIGN_OR_RETURN(const int32_t number, group.table->Open());
    Slot slot(&group, number);
    DFLASH_RETURN_IF_ERROR(group.table->Reserve(number, tokens));
    DFLASH_RETURN_IF_ERROR(group.target->Open(number));
    return slot;
  }
  Slot(Slot&& other) noexcept : group_(std::exchange(other.group_, nullptr)), number_(other.number_) {}
  ~Slot() {
    if (group_ != nullptr) (void)group_->table->Close(number_);
  }
  int32_t number() const { return number_; }

  // Runs the next tokens of the prompt; the step's taps.
  absl::StatusOr<MatrixView> Prefill(const std::vector<int32_t>& tokens) {
    StepBatch batch;
    batch.sequences.push_back({.slot = number_,
                               .phase = Phase::kPrefill,
                               .start_position = group_->table->lengths(number_).target_kv,
                               .tokens = tokens,
                               .parents = {},
                               .last_logits = false});
    DFLASH_ASSIGN_OR_RETURN(const ForwardResult result, group_->target->Forward(batch));
    return result.taps;
  }

 private:
  Slot(const Group* group, int32_t number) : group_(group), number_(number) {}
  const Group* group_;
  int32_t number_;
};

// Rows that lie in device memory, as a round would leave them there.
struct DeviceRows {
  Buffer tokens, segments;
  VerifyRows rows;
};
absl::StatusOr<DeviceRows> RowsOf(const Group& group, int32_t slot, const std::vector<int32_t>& tokens) {
  const Segment segment = {.slot = slot,
                           .first_row = 0,
                           .row_count = static_cast<int32_t>(tokens.size()),
                           .start_position = static_cast<int32_t>(group.table->lengths(slot).target_kv)};
  DeviceRows rows;
  const auto bytes = static_cast<int64_t>(tokens.size() * sizeof(int32_t));
  DFLASH_ASSIGN_OR_RETURN(rows.tokens, Buffer::Allocate(bytes, *group.stream));
  DFLASH_ASSIGN_OR_RETURN(rows.segments, Buffer::Allocate(sizeof(segment), *group.stream));
  DFLASH_RETURN_IF_ERROR(CopyToDevice(rows.tokens.data(), tokens.data(), bytes, *group.stream));
  DFLASH_RETURN_IF_ERROR(CopyToDevice(rows.segments.data(), &segment, sizeof(segment), *group.stream));
  rows.rows = {.tokens = rows.tokens.As<int32_t>(),
               .segments = {.data = rows.segments.As<Segment>(), .count = 1},
               .rows = static_cast<int64_t>(tokens.size())};
  return rows;
}

using States = std::vector<std::vector<float>>;  // in the order in which they come

// The hidden states of a prompt and a verification behind it.
absl::StatusOr<States> Collect(const RankOptions& options, const Group& group) {
  States states;
  absl::Status failed;
  group.target->set_observer([&](HiddenStateIndex, Phase, ConstMatrixView rows) {
    absl::StatusOr<std::vector<float>> values = ActivationsToHost(rows, *group.stream);
    if (values.ok()) {
      states.push_back(*std::move(values));
    } else {
      failed = values.status();
    }
  });
  const std::vector<int32_t> tokens = Tokens(kPromptRows + kVerifyRows, group.vocabulary, options.seed);
  const absl::Status run = [&] {
    DFLASH_ASSIGN_OR_RETURN(Slot slot, Slot::Open(group, kPromptRows + kVerifyRows));
    DFLASH_RETURN_IF_ERROR(slot.Prefill({tokens.begin(), tokens.begin() + kPromptRows}).status());
    DFLASH_ASSIGN_OR_RETURN(const DeviceRows rows,
                            RowsOf(group, slot.number(), {tokens.begin() + kPromptRows, tokens.end()}));
    DFLASH_RETURN_IF_ERROR(group.target->Verify(rows.rows).status());
    return group.stream->Synchronize();
  }();
  group.target->set_observer({});
  DFLASH_RETURN_IF_ERROR(run);
  DFLASH_RETURN_IF_ERROR(failed);
  return states;
}

absl::Status Write(const std::string& path, const States& states) {
  std::FILE* file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) return absl::UnavailableError(absl::StrCat("cannot write ", path));
  bool ok = true;
  for (const std::vector<float>& state : states) {
    const uint64_t size = state.size();
    ok = ok && std::fwrite(&size, sizeof(size), 1, file) == 1 &&
         std::fwrite(state.data(), sizeof(float), state.size(), file) == state.size();
  }
  ok = std::fclose(file) == 0 && ok;
  return ok ? absl::OkStatus() : absl::UnavailableError(absl::StrCat("cannot write ", path));
}

absl::StatusOr<States> Read(const std::string& path, const States& like) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) return absl::NotFoundError(absl::StrCat("cannot read ", path));
  States states;
  for (const std::vector<float>& own : like) {
    uint64_t size = 0;
    std::vector<float> state(own.size());
    if (std::fread(&size, sizeof(size), 1, file) != 1 || size != own.size() ||
        std::fread(state.data(), sizeof(float), state.size(), file) != state.size())
      break;
    states.push_back(std::move(state));
  }
  std::fclose(file);
  if (states.size() != like.size()) return absl::DataLossError(absl::StrCat(path, ": not of this model"));
  return states;
}

double RelativeError(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
    norm += static_cast<double>(b[i]) * b[i];
  }
  return std::sqrt(difference / std::max(norm, 1e-30));
}

absl::Status Compare(const RankOptions& options, const States& states, const States& expected,
                     Report& report) {
  report.Section("hidden states against the other group's: relative error");
  const size_t layers = states.size() / 2;  // of each phase, the embedding included
  std::string wrong;
  for (size_t layer = 0; layer < layers; ++layer) {
    const double prefill = RelativeError(states[layer], expected[layer]);
    const double verify = RelativeError(states[layers + layer], expected[layers + layer]);
    const double bar = options.tolerance * std::sqrt(static_cast<double>(std::max<size_t>(layer, 1)));
    // NaN is worse than anything.
    const bool good = prefill <= bar && verify <= bar;
    if (!good && wrong.empty()) wrong = absl::StrCat("hidden state ", layer, ": ", prefill, " and ", verify);
    if (layer < 2 || layer % 8 == 0 || layer + 1 == layers || !good) {
      report.Add(
          {absl::StrCat("hidden state ", layer), {{"prefill", prefill}, {"verify", verify}, {"bar", bar}}});
    }
  }
  return wrong.empty() ? absl::OkStatus() : absl::DataLossError(wrong);
}

}  // namespace

absl::Status CheckStates(const RankOptions& options, SwitchedCommunicator& communicator, const Group& group,
                         Report& report) {
  const bool is_first = communicator.rank() == 0;
  for (const bool peer : {false, true}) {
    if (peer && !communicator.has_peer()) continue;
    communicator.UsePeer(peer);
    DFLASH_ASSIGN_OR_RETURN(const States states, Collect(options, group));
    if (!is_first) continue;
    if (!options.write_states.empty()) DFLASH_RETURN_IF_ERROR(Write(options.write_states, states));
    if (!options.read_states.empty()) {
      DFLASH_ASSIGN_OR_RETURN(const States expected, Read(options.read_states, states));
      DFLASH_RETURN_IF_ERROR(Annotate(Compare(options, states, expected, report),
                                      peer ? "through peer memory" : "by the communicator"));
    }
  }
  // 64 rows a step: the residual is replicated. All at once: it is sharded.
  const int64_t sharded = options.group.shard_residual_rows;
  if (communicator.size() == 1 || sharded <= 64 || sharded > options.group.max_prefill_tokens ||
      group.contract.taps.empty())
    return absl::OkStatus();
  const std::vector<int32_t> tokens = Tokens(sharded, group.vocabulary, options.seed);
  std::vector<float> pieces, whole;
  for (const int64_t step : {int64_t{64}, sharded}) {
    std::vector<float>& taps = step == sharded ? whole : pieces;
    DFLASH_ASSIGN_OR_RETURN(Slot slot, Slot::Open(group, sharded));
    for (int64_t first = 0; first < sharded; first += step) {
      DFLASH_ASSIGN_OR_RETURN(const MatrixView view,
                              slot.Prefill({tokens.begin() + first, tokens.begin() + first + step}));
      DFLASH_ASSIGN_OR_RETURN(const std::vector<float> values, ActivationsToHost(view, *group.stream));
      taps.insert(taps.end(), values.begin(), values.end());
    }
  }
  if (whole != pieces)
    return absl::DataLossError("taps differ between the replicated and the sharded residual");
  if (is_first) report.Fact("taps of both residual layouts", "equal bits");
  return absl::OkStatus();
}

absl::Status MeasureForward(const RankOptions& options, SwitchedCommunicator& communicator,
                            const Group& group, Report& report) {
  const bool is_first = communicator.rank() == 0;
  if (is_first) report.Section(absl::StrCat("target's forward behind ", options.context, " tokens, ms"));
  const std::vector<int32_t> prompt = Tokens(options.context, group.vocabulary, options.seed);
  const int64_t piece = options.group.max_prefill_tokens / 64 * 64;
  const auto prefill = [&](Slot& slot) {
    for (int64_t first = 0; first < options.context; first += piece) {
      const int64_t last = std::min(first + piece, options.context);
      DFLASH_RETURN_IF_ERROR(slot.Prefill({prompt.begin() + first, prompt.begin() + last}).status());
    }
    return group.stream->Synchronize();
  };
  std::vector<double> prefills;
  for (int64_t i = 0; i < 4; ++i) {
    DFLASH_ASSIGN_OR_RETURN(Slot slot, Slot::Open(group, options.context));
    DFLASH_RETURN_IF_ERROR(communicator.Barrier(*group.stream));
    const absl::Time begin = absl::Now();
    DFLASH_RETURN_IF_ERROR(prefill(slot));
    if (i >= 1) prefills.push_back(absl::ToDoubleSeconds(absl::Now() - begin));
  }
  if (is_first) report.Add({"prompt", {{"ms", 1e3 * Median(prefills)}}});
  DFLASH_ASSIGN_OR_RETURN(Slot slot, Slot::Open(group, options.context + kVerifyRows));
  DFLASH_RETURN_IF_ERROR(prefill(slot));
  for (const int64_t count : {int64_t{1}, kVerifyRows}) {
    DFLASH_ASSIGN_OR_RETURN(const DeviceRows rows,
                            RowsOf(group, slot.number(), Tokens(count, group.vocabulary, options.seed + 1)));
    Row row = {absl::StrCat(count, count == 1 ? " row" : " rows"), {}};
    for (const bool peer : {false, true}) {
      if (peer && !communicator.has_peer()) continue;
      communicator.UsePeer(peer);
      const auto body = [&] { return group.target->Verify(rows.rows).status(); };
      DFLASH_RETURN_IF_ERROR(body());
      DFLASH_RETURN_IF_ERROR(communicator.Barrier(*group.stream));
      std::optional<Graph> graph;
      if (communicator.capturable()) {
        DFLASH_ASSIGN_OR_RETURN(graph, Graph::Capture(*group.stream, body));
      }
      std::vector<double> seconds;
      for (int64_t i = 0; i < options.repeats + 2; ++i) {
        DFLASH_RETURN_IF_ERROR(communicator.Barrier(*group.stream));
        const absl::Time begin = absl::Now();
        DFLASH_RETURN_IF_ERROR(graph.has_value() ? graph->Launch(*group.stream) : body());
        DFLASH_RETURN_IF_ERROR(group.stream->Synchronize());
        if (i >= 2) seconds.push_back(absl::ToDoubleSeconds(absl::Now() - begin));
      }
      DFLASH_RETURN_IF_ERROR(communicator.Check());
      row.figures.push_back({peer ? "peer memory" : "communicator", 1e3 * Median(seconds)});
    }
    if (is_first) report.Add(row);
  }
  return absl::OkStatus();
}

}  // namespace dflash::bench
