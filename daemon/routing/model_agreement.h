// Whether a worker group has the model that this coordinator serves. One that has another tokenizer would be
// sent the wrong tokens and answer nonsense; one that has other weights would go on with a request that
// another group has begun, in another text.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "base/model_identity.h"

namespace dflash {

// Where a group's processes are: children of this one, which load this one's --model, or on other hosts.
enum class GroupPlace : uint8_t { kLocal, kRemote };

class ModelAgreement {
 public:
  // `own`: of the coordinator's own files, without revisions: it need not have the weights. `decides`: which
  // groups can be the first; local ones where there are any, whose files are those of the coordinator.
  ModelAgreement(ModelIdentity own, GroupPlace decides) : own_(std::move(own)), decides_(decides) {}

  // The first group that agrees with the own files decides about the weights of all others, and of its own
  // next lives, for as long as the process lives; remote ones wait for it where local ones decide.
  // FailedPrecondition, naming what differs. Digests that one side does not have are not compared with the
  // own files, but between groups they are.
  absl::Status Admit(const ModelIdentity& group, GroupPlace place);

 private:
  const ModelIdentity own_;
  const GroupPlace decides_;
  absl::Mutex mutex_;
  std::optional<ModelIdentity> first_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace dflash
