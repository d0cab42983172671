#include "worker/rank/plan.h"

#include <bit>

namespace dflash {
namespace {

// Mixes 64-bit words in order; each step is a bijection of the state (Stafford's mixer, variant 13).
class Mixer {
 public:
  explicit Mixer(uint64_t state) : state_(state) {}
  Mixer& Add(uint64_t word) {
    state_ = (state_ ^ word) + 0x9e3779b97f4a7c15u;
    state_ = (state_ ^ (state_ >> 30)) * 0xbf58476d1ce4e5b9u;
    state_ = (state_ ^ (state_ >> 27)) * 0x94d049bb133111ebu;
    state_ ^= state_ >> 31;
    return *this;
  }
  Mixer& Add(int64_t value) { return Add(static_cast<uint64_t>(value)); }
  Mixer& Add(float value) { return Add(uint64_t{std::bit_cast<uint32_t>(value)}); }
  uint64_t value() const { return state_; }

 private:
  uint64_t state_;
};

}  // namespace

uint64_t ChainHash(uint64_t previous, const RankPlan& plan) {
  Mixer mixer(previous);
  mixer.Add(plan.number).Add(static_cast<int64_t>(plan.slots.size()));
  for (const RankPlan::SlotChange& change : plan.slots) {
    mixer.Add(static_cast<int64_t>(change.kind)).Add(int64_t{change.slot});
    mixer.Add(static_cast<int64_t>(change.pages.size()));
    for (int32_t page : change.pages) mixer.Add(int64_t{page});
    mixer.Add(change.sampling.temperature).Add(int64_t{change.sampling.top_k}).Add(change.sampling.top_p);
    mixer.Add(change.sampling.min_p).Add(change.sampling.seed);
    mixer.Add(change.begin.position).Add(int64_t{change.begin.index});
  }
  mixer.Add(plan.draft_sequences).Add(plan.block_rows).Add(static_cast<int64_t>(plan.rows.size()));
  for (const RankPlan::Rows& rows : plan.rows) {
    mixer.Add(int64_t{rows.slot})
        .Add(static_cast<int64_t>(rows.phase))
        .Add(rows.start_position)
        .Add(rows.count);
    mixer.Add(static_cast<int64_t>(rows.tokens.size())).Add(int64_t{rows.last_logits});
    for (int32_t token : rows.tokens) mixer.Add(int64_t{token});
    mixer.Add(static_cast<int64_t>(rows.checkpoints.size()));
    for (const StateCheckpoint& checkpoint : rows.checkpoints)
      mixer.Add(checkpoint.position).Add(int64_t{checkpoint.index});
    mixer.Add(int64_t{rows.has_rules}).Add(int64_t{rows.log_probs});
    mixer.Add(int64_t{rows.prompt_log_probs}).Add(int64_t{rows.next_token});
  }
  return mixer.value();
}

}  // namespace dflash
