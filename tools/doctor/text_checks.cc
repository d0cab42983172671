// tokenizer, template
#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "text/chat_template.h"
#include "tools/doctor/checks.h"
#include "worker/defects/defects.h"

namespace dflash::doctor {
namespace {

// The index of the first element that is not the same.
template <typename Sequence>
int64_t FirstDifference(const Sequence& a, const Sequence& b) {
  return std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin();
}

absl::StatusOr<std::string> Render(const ChatTemplate& chat_template, const golden::GoldenChat& chat,
                                   std::optional<bool> thinking) {
  ChatOptions options;
  options.enable_thinking = thinking;
  DFLASH_ASSIGN_OR_RETURN(RenderedChat rendered, chat_template.Render(chat.messages, nullptr, options));
  return std::move(rendered.text);
}

}  // namespace

absl::Status CheckTokenizer(const Subject& subject, const Tokenizer& tokenizer) {
  Report& report = *subject.report;
  if (subject.bundle == nullptr) {
    report.NotChecked("tokenizer", "needs a golden bundle");
    return absl::OkStatus();
  }
  const std::vector<GoldenPrompt>& prompts = subject.bundle->prompts();
  int64_t texts = 0, wrong = 0;
  std::string first;
  for (size_t i = 0; i < prompts.size(); ++i) {
    if (prompts[i].text.empty()) continue;
    ++texts;
    DFLASH_ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                            tokenizer.Encode(prompts[i].text, AddedTokens::kParse));
    if (ids == prompts[i].prompt_ids) continue;
    if (wrong++ == 0) {
      first =
          absl::StrCat("; prompt ", i, " differs from token ", FirstDifference(ids, prompts[i].prompt_ids));
    }
  }
  if (texts == 0) {
    report.NotChecked("tokenizer", "the bundle holds no texts");
    return absl::OkStatus();
  }
  report.Judge("tokenizer", static_cast<double>(wrong), 0,
               absl::StrCat("token ids of ", texts, " prompts in the bundle"),
               absl::StrCat(texts - wrong, " of ", texts, " prompts are the same tokens", first),
               "tokenizer.json of another revision, or added tokens that are read as text");
  return absl::OkStatus();
}

absl::Status CheckTemplate(const Subject& subject, const std::string& model_folder,
                           const std::string& defect) {
  Report& report = *subject.report;
  if (subject.bundle == nullptr) {
    report.NotChecked("template", "needs a golden bundle");
    return absl::OkStatus();
  }
  const absl::StatusOr<ChatTemplate> chat_template = ChatTemplate::Load(model_folder);
  int64_t chats = 0, wrong = 0;
  std::string first, cause = "another chat template than the bundle's";
  for (size_t i = 0; i < subject.bundle->prompts().size(); ++i) {
    const GoldenPrompt& prompt = subject.bundle->prompts()[i];
    if (!prompt.chat || prompt.text.empty()) continue;
    if (!chat_template.ok()) {
      report.FailInput("template", std::string(chat_template.status().message()),
                       absl::StrCat("--model ", model_folder, ": chat_template.jinja"));
      return absl::OkStatus();
    }
    ++chats;
    std::optional<bool> thinking = prompt.chat->enable_thinking;
    if (!defect.empty()) DFLASH_RETURN_IF_ERROR(PlantDefect(defect, thinking));
    const absl::StatusOr<std::string> text = Render(*chat_template, *prompt.chat, thinking);
    if (!text.ok()) {
      report.FailInput(
          "template",
          absl::StrCat("the chat of prompt ", i, " cannot be rendered: ", text.status().message()),
          absl::StrCat("--model ", model_folder, ": chat_template.jinja; golden bundle ",
                       subject.bundle->folder(), ": chat of prompt ", i));
      return absl::OkStatus();
    }
    if (*text == prompt.text) continue;
    if (wrong++ == 0)
      first = absl::StrCat("; prompt ", i, " differs from byte ", FirstDifference(*text, prompt.text));
    // Does the other thinking flag render what was recorded?
    const bool flag = thinking.value_or(true);
    const absl::StatusOr<std::string> other = Render(*chat_template, *prompt.chat, !flag);
    if (other.ok() && *other == prompt.text) {
      cause = absl::StrCat("the thinking flag is ", flag ? "on" : "off", " where the bundle has it ",
                           flag ? "off" : "on");
    }
  }
  if (chats == 0) {
    report.NotChecked("template", "the bundle holds no chats");
    return absl::OkStatus();
  }
  report.Judge("template", static_cast<double>(wrong), 0,
               absl::StrCat("texts of ", chats, " chats in the bundle"),
               absl::StrCat(chats - wrong, " of ", chats, " chats are rendered alike", first), cause);
  return absl::OkStatus();
}

}  // namespace dflash::doctor
