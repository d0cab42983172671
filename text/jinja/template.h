// A parsed template. The language is the part of Jinja that chat templates use, with the settings of
// transformers (trim_blocks, lstrip_blocks, loop controls, its tojson, raise_exception and strftime_now);
// docs/spec/chat-template.md lists it. What is left out is refused by name, when the template is parsed
// wherever that is possible.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "text/jinja/ast.h"
#include "text/jinja/marked_text.h"
#include "text/jinja/runtime.h"
#include "text/jinja/value.h"

namespace dflash::jinja {

// Immutable; any number of threads may render it at once, each with a Runtime of its own.
class Template {
 public:
  // Errors, with "line N: ": InvalidArgument for a template that Jinja rejects or that is not valid UTF-8,
  // Unimplemented for a feature that is left out, ResourceExhausted when it is too long or nests too deep.
  static absl::StatusOr<Template> Parse(std::string_view source, const Limits& limits);

  // Renders with these variables; each variable is visible by its name. Values must come from the same
  // `runtime`. Errors, with "line N: ": InvalidArgument for what the template raises (the message of
  // raise_exception) and for operations that its values do not allow, Unimplemented, ResourceExhausted naming
  // the limit.
  absl::StatusOr<MarkedText> Render(Runtime& runtime,
                                    std::vector<std::pair<std::string, Value>> variables) const;

 private:
  explicit Template(Body body) : body_(std::make_shared<const Body>(std::move(body))) {}

  std::shared_ptr<const Body> body_;
};

}  // namespace dflash::jinja
