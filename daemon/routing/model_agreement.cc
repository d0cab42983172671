#include "daemon/routing/model_agreement.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace dflash {
namespace {

constexpr size_t kShownDigits = 12;

struct Part {
  const char* name;
  std::string ModelIdentity::*digest;
};
constexpr Part kParts[] = {{"tokenizer", &ModelIdentity::tokenizer},
                           {"target's config.json", &ModelIdentity::target_config},
                           {"drafter's config.json", &ModelIdentity::drafter_config},
                           {"target's weights", &ModelIdentity::target_revision},
                           {"drafter's weights", &ModelIdentity::drafter_revision}};

std::string Shown(const std::string& digest) {
  return digest.empty() ? "none" : digest.substr(0, kShownDigits);
}

std::string Difference(const Part& part, const ModelIdentity& theirs, const ModelIdentity& ours) {
  return absl::StrCat(part.name, " (", Shown(theirs.*part.digest), ", not ", Shown(ours.*part.digest), ")");
}

absl::Status Refusal(const std::vector<std::string>& differences, const char* from_what) {
  return absl::FailedPreconditionError(
      absl::StrCat("refused, it has another model than ", from_what, ": ", absl::StrJoin(differences, ", ")));
}

}  // namespace

absl::Status ModelAgreement::Admit(const ModelIdentity& group, GroupPlace place) {
  std::vector<std::string> differences;
  for (const Part& part : kParts) {
    const std::string &theirs = group.*part.digest, &ours = own_.*part.digest;
    if (!theirs.empty() && !ours.empty() && theirs != ours)
      differences.push_back(Difference(part, group, own_));
  }
  if (!differences.empty()) return Refusal(differences, "this server's files");
  absl::MutexLock lock(&mutex_);
  if (!first_.has_value()) {
    if (decides_ == GroupPlace::kLocal && place == GroupPlace::kRemote)
      return absl::FailedPreconditionError("waits until a group of this host has said what weights it has");
    first_ = group;
  }
  for (const Part& part : kParts) {
    if (group.*part.digest != (*first_).*part.digest) differences.push_back(Difference(part, group, *first_));
  }
  if (differences.empty()) return absl::OkStatus();
  return Refusal(differences, "the first group that this server had");
}

}  // namespace dflash
