#include "tools/dflashctl/answer.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "tools/dflashctl/round_view.h"

namespace dflash::ctl {
namespace {

void Print(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

}  // namespace

grpc::Status StreamAnswer(Connection* connection, const v1::GenerateRequest& request,
                          const AnswerOptions& options, Generation* result) {
  RoundPainter painter(isatty(STDOUT_FILENO) != 0 && std::getenv("NO_COLOR") == nullptr);
  grpc::Status detokenized;
  const auto on_chunk = [&](const v1::Chunk& chunk) {
    if (!options.show_rounds) {
      Print(chunk.text());
      return;
    }
    for (const Piece& piece : SplitByOrigin(chunk)) {
      v1::DetokenizeRequest detokenize;
      detokenize.mutable_token_ids()->Assign(piece.token_ids.begin(), piece.token_ids.end());
      detokenize.set_skip_special_tokens(true);
      v1::DetokenizeResponse response;
      if (detokenized.ok()) detokenized = connection->Detokenize(detokenize, &response);
      Print(painter.Paint(piece.origin, response.text()));
    }
  };
  const grpc::Status status = connection->Generate(request, options.timeout, on_chunk, result);
  Print(painter.Finish() + "\n");
  if (!status.ok()) return status;
  if (!detokenized.ok()) return detokenized;
  std::fprintf(stderr, "[%s]\n", AnswerSummary(result->finished).c_str());
  if (options.show_rounds) {
    const std::string by_depth = AcceptanceByDepth(result->finished.speculation());
    if (!by_depth.empty()) std::fprintf(stderr, "[%s]\n", by_depth.c_str());
  }
  return grpc::Status::OK;
}

}  // namespace dflash::ctl
