#include <utility>

#include "kernels/device/graph.h"

namespace dflash {

struct Graph::Impl {
  std::function<absl::Status()> body;
};

Graph::Graph(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Graph::Graph(Graph&&) noexcept = default;
Graph& Graph::operator=(Graph&&) noexcept = default;
Graph::~Graph() = default;

absl::StatusOr<Graph> Graph::Capture(const Stream&, std::function<absl::Status()> body) {
  return Graph(std::make_unique<Impl>(std::move(body)));
}

bool Graph::IsCaptureCostly() { return false; }

absl::Status Graph::Launch(const Stream&) const { return impl_->body(); }

}  // namespace dflash
