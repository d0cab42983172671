// window, paging, chunked-prefill, prefix: a context that is longer than every window
#include <algorithm>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "kernels/batch/segments.h"
#include "tools/doctor/checks.h"
#include "tools/doctor/comparisons.h"

namespace dflash::doctor {
namespace {

// --- window

// Sizes that a window could have by mistake, in ascending order: none, another layer's, one more or less,
// half or twice as many.
std::set<int64_t> PossibleWindows(const std::vector<DraftLayerMask>& layers) {
  std::set<int64_t> sizes = {0};
  for (const DraftLayerMask& mask : layers) {
    if (mask.window == 0) continue;
    for (const int64_t size :
         {mask.window, mask.window - 1, mask.window + 1, 2 * mask.window, mask.window / 2}) {
      if (size > 0) sizes.insert(size);
    }
  }
  return sizes;
}

struct WindowErrors {
  StageError worst;  // with the wanted windows
  std::vector<std::string> seen, wrong;
  std::vector<std::string> unexplained;  // layers that no window explains
  bool dropped = false, by_one = false;  // among those that are wrong
};

// With the causality that the brief context showed, so that a wrong one is not taken for a wrong window.
absl::StatusOr<WindowErrors> MeasureWindows(const Subject& subject, const SequenceRecord& whole,
                                            const SequenceRecord& brief) {
  const std::vector<DraftLayerMask>& layers = subject.contract().layers;
  const std::set<int64_t> possible = PossibleWindows(layers);
  WindowErrors errors;
  for (size_t layer = 0; layer < subject.reference->config().layers.size(); ++layer) {
    const DraftLayerMask& wanted = layers[layer];
    DFLASH_ASSIGN_OR_RETURN(const MaskMatch in_brief,
                            ClosestMask(subject, brief, layer, {wanted.causal, wanted.window},
                                        {{!wanted.causal, wanted.window}}));
    const bool causal = in_brief.mask.causal;
    std::vector<Mask> others;
    for (const int64_t size : possible) others.push_back({causal, size});
    DFLASH_ASSIGN_OR_RETURN(const MaskMatch match,
                            ClosestMask(subject, whole, layer, {causal, wanted.window}, others));
    const int64_t window = match.mask.window;
    errors.worst.Keep(match.wanted);
    errors.seen.push_back(
        absl::StrCat(CausalityName(causal), ", ",
                     window == 0 ? std::string("no window") : absl::StrCat("window ", window)));
    if (window == wanted.window) {
      if (match.wanted.fails()) {
        errors.unexplained.push_back(
            absl::StrFormat("layer %d is off by %.2g with the wanted window", layer, match.wanted.error));
      }
      continue;
    }
    errors.dropped |= window == 0;
    errors.by_one |= std::abs(window - wanted.window) == 1;
    errors.wrong.push_back(
        absl::StrCat("layer ", layer, " has ",
                     window == 0 ? std::string("no window") : absl::StrCat("a window of ", window),
                     ", wanted ", wanted.window == 0 ? std::string("none") : absl::StrCat(wanted.window)));
  }
  return errors;
}

absl::Status CheckWindow(const Subject& subject, const SequenceRecord& whole, const SequenceRecord& brief) {
  Report& report = *subject.report;
  subject.reference->ForgetLargest();
  DFLASH_ASSIGN_OR_RETURN(const WindowErrors errors, MeasureWindows(subject, whole, brief));
  const std::string seen = absl::StrJoin(errors.seen, "; ");
  const std::string compared = absl::StrCat("literals of the bundle, context of ", whole.length());
  const double gate = std::min(errors.worst.gate, 1.0);  // of another layer, if that tells nothing
  int64_t longest = 0;
  for (const DraftLayerMask& mask : subject.contract().layers) longest = std::max(longest, mask.window);
  if (subject.bundle == nullptr) {
    report.NotChecked("window", absl::StrCat("needs a golden bundle; seen: ", seen));
  } else if (!errors.wrong.empty()) {
    // A window that fits better fails in any case: the rows at its edge may weigh little.
    report.Judge("window", std::max(errors.worst.error, 2 * gate), gate, compared,
                 absl::StrJoin(errors.wrong, "; "),
                 errors.dropped  ? "the sliding windows are dropped: sliding layers see the whole context"
                 : errors.by_one ? "the window is off by one: of W positions the query's own is one, so that "
                                   "q - k < W is seen"
                                 : "another sliding_window");
  } else if (!errors.unexplained.empty()) {
    JudgeStage(subject, "window", errors.worst, compared, absl::StrJoin(errors.unexplained, "; "),
               "the attention is none that a window explains: scale, heads or keys");
  } else if (longest >= whole.length()) {
    report.NotChecked("window",
                      absl::StrCat("a context of ", whole.length(), " does not reach the window of ", longest,
                                   ": --max-context-tokens ", longest + 96, " would"));
  } else {
    JudgeStage(subject, "window", errors.worst, compared, seen, "");
  }
  return absl::OkStatus();
}

// --- what is stored

absl::Status CheckPaging(const Subject& subject, const SequenceRecord& whole) {
  const std::vector<int64_t> positions = Sampled(whole.length());
  const Rows c = Pick(whole.features, positions);
  StageError worst;
  subject.reference->ForgetLargest();
  for (size_t layer = 0; layer < subject.reference->config().layers.size(); ++layer) {
    DFLASH_ASSIGN_OR_RETURN(const StageError error,
                            CompareStage(subject, Pick(whole.context[layer].v, positions), [&] {
                              return subject.reference->Values(layer, subject.reference->Rounded(c));
                            }));
    worst.Keep(error);
  }
  const int64_t pages = (whole.length() + kPageTokens - 1) / kPageTokens;
  JudgeStage(subject, "paging", worst, "double precision, v_proj c of sampled positions",
             absl::StrCat("a context of ", whole.length(), " positions in ", pages, " pages"),
             "pages of the drafter's context are freed or written again while they are read");
  return absl::OkStatus();
}

void CheckChunkedPrefill(const Subject& subject, const SequenceRecord& whole, const SequenceRecord& chunked) {
  Report& report = *subject.report;
  const std::string compared = absl::StrCat("the same prompt of ", whole.length(), " tokens in one piece");
  if (chunked.context_start != whole.context_start) {
    report.Fail(
        "chunked-prefill",
        absl::StrFormat("in pieces of 64 the context covers positions %d to %d only, in one piece %d to %d",
                        chunked.context_start, chunked.context_end, whole.context_start, whole.context_end),
        "only the last prefill chunk's taps reach the drafter");
    report.Of("chunked-prefill").compared = compared;
    return;
  }
  int64_t layers = 0;
  for (size_t layer = 0; layer < subject.reference->config().layers.size(); ++layer) {
    const LayerContext &a = whole.context[layer], &b = chunked.context[layer];
    layers += !(a.k == b.k && a.v == b.v);
  }
  if (layers == 0 && JudgeFinite(subject, "chunked-prefill", whole.pass.logits)) return;
  const double logits = RelativeError(chunked.pass.logits, whole.pass.logits);
  report.Judge("chunked-prefill", std::max(logits, static_cast<double>(layers)), 0, compared,
               absl::StrFormat("%d layers with another context; draft logits off by %.2g", layers, logits),
               "pieces of a prompt change what is computed");
}

// That the context covers the prompt. What a prefix cache gives back, engine_checks.cc tries.
void CheckPrefix(const Subject& subject, const SequenceRecord& whole) {
  subject.report->Judge(
      "prefix", 1 - whole.coverage(), 0, "coverage 1: context of every position of the prompt",
      absl::StrFormat("the drafter's context covers positions %d to %d of a prompt of %d (%.0f%%)",
                      whole.context_start, whole.context_end, whole.length(), 100 * whole.coverage()),
      "the prefix is restored without drafter context: the target goes on where the drafter knows nothing");
}

}  // namespace

absl::Status CheckLongContext(const Subject& subject, const SequenceRecord& whole,
                              const SequenceRecord& chunked, const SequenceRecord& brief) {
  DFLASH_RETURN_IF_ERROR(CheckWindow(subject, whole, brief));
  DFLASH_RETURN_IF_ERROR(CheckPaging(subject, whole));
  CheckChunkedPrefill(subject, whole, chunked);
  CheckPrefix(subject, whole);
  return absl::OkStatus();
}

}  // namespace dflash::doctor
