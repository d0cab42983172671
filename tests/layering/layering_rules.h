// The direction of dependencies (docs/ARCHITECTURE.md, "Layers") as rules over #include lines.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace dflash::layering {

// One #include line: what stands between the quotes or brackets.
struct Include {
  int line = 0;
  std::string target;
};

// The #include lines of a C++ source. Lines inside comments count too: no source needs them.
std::vector<Include> ReadIncludes(const std::string& source);

// Judges one edge. `from` is the including file, relative to the root of the repository; `target` is what it
// includes: a project header (relative to the root), a generated protobuf header, or somebody else's header.
// Returns the broken rule in words; empty when the edge is allowed.
std::string BrokenRule(const std::string& from, const std::string& target);

// Applies BrokenRule to every C++ and CUDA source below `root`, and demands that each project header that is
// included exists under exactly that path. Returns one line per violation: "file:line: rule".
// `files_read` (may be null) counts the sources.
std::vector<std::string> CheckTree(const std::filesystem::path& root, int* files_read);

}  // namespace dflash::layering
