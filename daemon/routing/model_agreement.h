// Whether a worker group has the model that this coordinator serves. One that has another tokenizer would be
// sent the wrong tokens and answer nonsense; one that has other weights would go on with a request that
// another group has begun, in another text.
#pragma once

#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "base/model_identity.h"

namespace dflash {

class ModelAgreement {
 public:
  // `own`: of the coordinator's own files, without revisions: it need not have the weights.
  explicit ModelAgreement(ModelIdentity own) : own_(std::move(own)) {}

  // The first group that agrees with the own files decides about the weights of all others, and of its own
  // next lives, for as long as the process lives. FailedPrecondition, naming what differs. Digests that one
  // side does not have are not compared with the own files, but between groups they are.
  absl::Status Admit(const ModelIdentity& group);

 private:
  const ModelIdentity own_;
  absl::Mutex mutex_;
  std::optional<ModelIdentity> first_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace dflash
