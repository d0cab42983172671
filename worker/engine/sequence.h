// A request in the engine, from its arrival to its end: what it asks for, what it has put out, where its
// stores stand. Engine thread only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "worker/decode/decode_rounds.h"
#include "worker/engine/constraint_cache.h"
#include "worker/engine/content_class.h"
#include "worker/engine/request.h"
#include "worker/engine/sequence_rules.h"
#include "worker/engine/text_stream.h"

namespace dflash {

// What every sequence of an engine shares. Not owned; outlive the sequences.
struct SequenceParts {
  const Tokenizer* tokenizer = nullptr;  // null: no text
  const ContentMarks* content_marks = nullptr;
  ConstraintCache* constraints = nullptr;
  int64_t vocabulary = 0;
};

struct Sequence {
  // Prepares text, rules and content; what was emitted in an earlier life follows with TakeEarlierOutput.
  // Errors: TextStream::Create, ConstraintCache::Find, SequenceRules::Create.
  absl::Status Prepare(const SequenceParts& parts);
  // Takes over what an earlier life emitted, whose text was sent then. False where that had ended, or where
  // the constraint does not allow it (InvalidArgument): the sink knows then, and the sequence is done.
  bool TakeEarlierOutput();

  // Hands new tokens to the request's text and its sink, and ends the request when they say so. A negative
  // token stands for logits that are not numbers. `log_probs` are those of the tokens, where the request
  // wants them; round: null for the first token, which comes from prefill.
  void Emit(const std::vector<int32_t>& tokens, const std::vector<TokenLogProbs>& log_probs,
            const RoundReport* round);
  // `places` are those of the prompt's tokens behind `first`. What an earlier life, or an earlier run of the
  // prompt, has reported is not said again.
  void EmitPromptLogProbs(int64_t first, std::vector<TokenLogProbs> places);
  // Ends it, unless it has ended.
  void Fail(const absl::Status& status);

  // What a decode round begins with, once it is at its anchor.
  DecodeState ToDecodeState() const;

  int64_t prompt_size() const { return static_cast<int64_t>(request.prompt_tokens.size()); }
  int64_t emitted() const { return static_cast<int64_t>(output.size()); }
  int64_t room() const { return request.max_tokens - emitted(); }
  // All that comes before the anchor, its last emitted token, is stored.
  bool at_anchor() const { return emitted() > 0 && stored == prompt_size() + emitted() - 1; }
  // Has to run the prompt itself, for its log probabilities.
  bool scores_prompt() const { return request.prompt_log_probs > 0 && scored < prompt_size() - 1; }
  bool begins_with_cached() const { return request.use_prefix_cache && !scores_prompt(); }

  GenerationRequest request;
  std::unique_ptr<RequestSink> sink;
  TextStream text;
  std::unique_ptr<SequenceRules> rules;  // null: its logits are sampled as they are
  ContentTracker content;
  ContextOrigin origin = ContextOrigin::kCold;
  int64_t arrival = 0;
  int64_t overtaken = 0;
  bool started = false;  // had a slot before
  int32_t slot = -1;
  int64_t stored = 0;  // tokens in its stores, as far as the host knows
  int64_t paused_steps = 0;
  int64_t rounds_in_flight = 0;  // enqueued, their tokens not yet read
  std::vector<int32_t> output;   // emitted
  std::string sent_text;         // of an earlier life, until the sink is told, if it wants to know
  int64_t scored = 0;     // prompt tokens whose log probabilities were reported, of those that have any
  FinishedReport report;  // grows with the request
  absl::Time prefill_start, first_token;
  bool done = false;
  bool had_fault = false;  // logits that are not numbers

 private:
  bool IsStop(int32_t token) const;
  // Takes one more token into the output and adds what text it completes. True when the output ends with it.
  bool Advance(int32_t token, std::string& new_text);
  void CountDrafts(const RoundReport& round);
  void Finish();
};

}  // namespace dflash
