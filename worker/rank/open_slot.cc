#include "worker/rank/open_slot.h"

#include "base/status.h"

namespace dflash {

absl::Status OpenSlot(int32_t slot, const StateCheckpoint& begin, Target* target, Drafter* drafter,
                      SequenceTable* table) {
  if (begin.position == 0) {
    DFLASH_RETURN_IF_ERROR(target->Open(slot));
  } else {
    DFLASH_RETURN_IF_ERROR(target->Restore(slot, begin.index));
    DFLASH_RETURN_IF_ERROR(table->AdvancePrompt(slot, begin.position));
  }
  if (drafter == nullptr) return absl::OkStatus();
  DFLASH_RETURN_IF_ERROR(drafter->Open(slot, 0));
  return begin.position == 0 ? absl::OkStatus() : table->AdvanceDraftContext(slot, begin.position);
}

}  // namespace dflash
