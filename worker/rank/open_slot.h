// How a sequence begins in a slot, on every rank.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "worker/cache/sequence_table.h"
#include "worker/cache/state_checkpoint.h"
#include "worker/draft/drafter.h"
#include "worker/model/target.h"

namespace dflash {

// Makes an open slot of `table` a sequence whose first `begin.position` tokens are there: its recurrent
// states are a copy of the checkpoint (zero, and nothing is there, with position 0), and keys, values and
// drafter context lie in pages that the slot gets or has got. `drafter` may be null. Errors: those of
// Target::Restore.
absl::Status OpenSlot(int32_t slot, const StateCheckpoint& begin, Target* target, Drafter* drafter,
                      SequenceTable* table);

}  // namespace dflash
