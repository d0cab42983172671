#include "text/jinja/template.h"

#include "text/jinja/interpreter.h"
#include "text/jinja/parser.h"
#include "text/jinja/unicode.h"

namespace dflash::jinja {

absl::StatusOr<Template> Template::Parse(std::string_view source, const Limits& limits) {
  if (source.size() > limits.max_template_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the template has ", source.size(),
                     " bytes, more than max_template_bytes = ", limits.max_template_bytes));
  }
  if (!IsValidUtf8(source)) return absl::InvalidArgumentError("the template is not valid UTF-8");
  DFLASH_ASSIGN_OR_RETURN(Body body, jinja::Parse(source, limits));
  return Template(std::move(body));
}

absl::StatusOr<MarkedText> Template::Render(Runtime& runtime,
                                            std::vector<std::pair<std::string, Value>> variables) const {
  return Interpreter(runtime, std::move(variables)).Run(*body_);
}

}  // namespace dflash::jinja
