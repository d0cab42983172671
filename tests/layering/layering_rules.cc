#include "tests/layering/layering_rules.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <set>
#include <sstream>

namespace dflash::layering {
namespace {

using Names = std::set<std::string>;

// Which top-level folders a folder may include, besides itself.
const std::map<std::string, Names>& FolderArrows() {
  static const auto* const arrows = new std::map<std::string, Names>{
      {"base", {}},
      {"kernels", {"base"}},
      {"text", {"base"}},
      {"worker", {"base", "kernels", "text"}},
      {"daemon", {"base", "text"}},
      {"tools", {"base", "kernels", "text", "worker", "daemon"}},
      {"tests", {"base", "kernels", "text", "worker", "daemon", "tools"}},
  };
  return *arrows;
}

// The same one level down. A folder's own top level (main.cc) may include everything below it.
const std::map<std::string, std::map<std::string, Names>>& SubfolderArrows() {
  static const auto* const arrows = new std::map<std::string, std::map<std::string, Names>>{
      {"worker",
       {{"cache", {}},
        {"comm", {}},
        {"model", {"cache", "comm"}},
        {"draft", {"cache", "comm", "model"}},
        {"verify", {}},
        {"defects", {"cache", "model", "draft"}},
        {"decode", {"cache", "comm", "model", "draft"}},
        {"rank", {"cache", "comm", "decode", "draft", "model"}},
        {"engine", {"cache", "comm", "decode", "draft", "model", "rank", "verify"}},
        {"golden", {"model"}},
        {"self_test", {"engine", "golden", "model"}},
        {"rpc", {"engine", "rank"}}}},
      {"daemon",
       {{"config", {}},
        {"request", {}},
        {"log", {}},
        {"ops", {}},
        {"traces", {}},
        {"admission", {"request"}},
        {"auth", {"request"}},
        {"frontend", {"request"}},
        {"metrics", {"request"}},
        {"routing", {"admission", "request"}},
        {"rpc", {"auth", "frontend", "log", "metrics", "request", "routing", "traces"}}}},
  };
  return *arrows;
}

// Other people's headers that only some folders may see.
struct ForeignRule {
  const char* pattern;  // of the included header
  const char* allowed;  // of the including file
  const char* words;
};
constexpr ForeignRule kForeignRules[] = {
    {R"(^grpc/support/log\.h$)", R"(^(base/grpc_log\.cc$|(worker|daemon)/rpc/|tools/|tests/))",
     "gRPC's log belongs to base/grpc_log"},
    {R"(^(grpc(?!/support/log\.h)|grpcpp|google/(protobuf|rpc))/)",
     R"(^((worker|daemon)/rpc/|tools/|tests/))",
     "gRPC and protobuf belong to the rpc/ folders, tools/ and tests/"},
    {R"(^prometheus/(exposer|gateway|text_serializer))", R"(^(daemon|tools|tests)/)",
     "the coordinator is the only Prometheus exporter"},
    {R"(^prometheus/)", R"(^(base|worker|daemon|tools|tests)/)", "text and kernels count nothing"},
    {R"(^boost/)", R"(^(worker|daemon|tools|tests)/)", "base, text and kernels hold no sockets"},
    {R"(^(sys/socket|netinet/.*|arpa/inet|netdb)\.h$)", R"(^(worker|daemon|tools|tests)/|_test\.cc$)",
     "base, text and kernels hold no sockets"},
    {R"(^(cuda|cub|cooperative_groups|cublas|mma\.h|nvtx))",
     R"(^(kernels/.*(\.cuh?$|_cuda\.|/cuda/)|tests/))", "CUDA belongs to the CUDA backend in kernels/"},
    {R"(^yaml-cpp/)", R"(^daemon/config/)", "YAML belongs to the configuration file"},
    {R"(^nccl)", R"(^worker/comm/.*nccl)", "NCCL belongs to its communicator in worker/comm"},
    {R"(^(gtest|gmock)/)", R"(_test\.(cc|cu)$|^tests/|/testing/)", "only tests include the test framework"},
};

bool Matches(const std::string& text, const char* pattern) {
  return std::regex_search(text, std::regex(pattern, std::regex::ECMAScript));
}

std::string FirstFolder(const std::string& path) {
  const size_t slash = path.find('/');
  return slash == std::string::npos ? std::string() : path.substr(0, slash);
}

// "worker/model/target.h" -> "model"; "worker/main.cc" -> "".
std::string SecondFolder(const std::string& path) {
  const size_t slash = path.find('/');
  return slash == std::string::npos ? std::string() : FirstFolder(path.substr(slash + 1));
}

bool IsTest(const std::string& path) { return Matches(path, R"(_test\.(cc|cu)$|^tests/|/testing/)"); }

enum class Backend { kContract, kCpu, kCuda, kReference };

// Whose file it is, by its name.
Backend BackendOf(const std::string& path) {
  if (Matches(path, R"(\.cuh?$|_cuda\.|/cuda/)")) return Backend::kCuda;
  if (Matches(path, R"(/cpu/|_cpu[._]|_(body|scalar|avx2|avx512)\.)")) return Backend::kCpu;
  if (Matches(path, R"(_ref\.)")) return Backend::kReference;
  return Backend::kContract;
}

std::string BrokenKernelRule(const std::string& from, const std::string& target) {
  if (IsTest(from)) return "";
  const Backend to = BackendOf(target);
  if (FirstFolder(from) != "kernels") {
    return to == Backend::kContract || FirstFolder(from) == "tools"
               ? ""
               : "outside kernels/ only contract headers are seen, no backend's and no reference's";
  }
  if (to == Backend::kReference) return BackendOf(from) == to ? "" : "references serve tests only";
  if (to == Backend::kCpu && BackendOf(from) == Backend::kCuda)
    return "the CUDA backend includes the CPU backend's";
  if (to == Backend::kCuda && BackendOf(from) != Backend::kCuda)
    return "a CUDA header outside the CUDA backend";
  const bool contract_header = BackendOf(from) == Backend::kContract && from.ends_with(".h");
  if (to == Backend::kCpu && contract_header) return "a contract header includes a backend's header";
  return "";
}

bool IsSource(const std::filesystem::path& path) {
  static const auto* const extensions = new Names{".h", ".cc", ".cu", ".cuh", ".inc", ".cpp", ".hpp", ".c"};
  return extensions->contains(path.extension().string());
}

}  // namespace

std::vector<Include> ReadIncludes(const std::string& source) {
  static const auto* const pattern = new std::regex(R"(^\s*#\s*include\b\s*(?:["<]([^">]*)[">])?)");
  std::vector<Include> includes;
  std::istringstream lines(source);
  std::string text;
  for (int line = 1; std::getline(lines, text); ++line) {
    std::smatch match;
    if (std::regex_search(text, match, *pattern)) includes.push_back({line, match[1].str()});
  }
  return includes;
}

std::string BrokenRule(const std::string& from, const std::string& target) {
  if (target.empty()) return "an #include that names no header cannot be judged";
  const std::string from_folder = FirstFolder(from);
  const auto arrows = FolderArrows().find(from_folder);
  if (arrows == FolderArrows().end()) return "a source outside the folders of the layout";
  if (target.starts_with("..") || target.find("/../") != std::string::npos || target.starts_with("./")) {
    return "includes are relative to the root of the repository";
  }

  if (target.starts_with("dflash/")) {  // generated from proto/dflash
    if (!Matches(from, R"(^((worker|daemon)/rpc/|tools/|tests/))")) {
      return "generated protobuf code belongs to the rpc/ folders, tools/ and tests/";
    }
    return "";
  }
  for (const ForeignRule& rule : kForeignRules) {
    if (Matches(target, rule.pattern) && !Matches(from, rule.allowed)) return rule.words;
  }

  const std::string to_folder = FirstFolder(target);
  if (!FolderArrows().contains(to_folder)) return "";  // somebody else's header
  if (IsTest(target) && !IsTest(from)) return "only tests include test support";
  if (to_folder == "tests") return "";
  if (to_folder != from_folder && !arrows->second.contains(to_folder)) {
    return from_folder + "/ may not include " + to_folder + "/";
  }
  if (to_folder == "kernels") {
    if (std::string broken = BrokenKernelRule(from, target); !broken.empty()) return broken;
  }
  if (to_folder == from_folder && !IsTest(from)) {
    const auto inside = SubfolderArrows().find(from_folder);
    const std::string from_part = SecondFolder(from), to_part = SecondFolder(target);
    if (inside != SubfolderArrows().end() && !from_part.empty() && from_part != to_part) {
      const auto part = inside->second.find(from_part);
      if (part == inside->second.end())
        return from_folder + "/" + from_part + " has no place among the layers";
      if (!part->second.contains(to_part)) {
        return from_folder + "/" + from_part + " may not include " + from_folder + "/" + to_part;
      }
    }
  }
  return "";
}

std::vector<std::string> CheckTree(const std::filesystem::path& root, int* files_read) {
  namespace fs = std::filesystem;
  const Names skipped = {"build", ".git", ".cache", ".bundle", "node_modules"};
  std::vector<fs::path> sources;
  for (auto it = fs::recursive_directory_iterator(root); it != fs::recursive_directory_iterator(); ++it) {
    if (it->is_directory() && skipped.contains(it->path().filename().string())) {
      it.disable_recursion_pending();
    } else if (it->is_regular_file() && IsSource(it->path())) {
      sources.push_back(it->path());
    }
  }
  std::sort(sources.begin(), sources.end());

  std::vector<std::string> violations;
  for (const fs::path& path : sources) {
    std::ifstream stream(path, std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
    const std::string from = path.lexically_relative(root).generic_string();
    if (!FolderArrows().contains(FirstFolder(from)))
      violations.push_back(from + ": a source outside the layout");
    for (const Include& include : ReadIncludes(text)) {
      std::string broken = BrokenRule(from, include.target);
      if (broken.empty() && FolderArrows().contains(FirstFolder(include.target)) &&
          !fs::exists(root / include.target)) {
        broken = "no such header";
      }
      if (broken.empty() && include.target.find('/') == std::string::npos &&
          fs::exists(path.parent_path() / include.target)) {
        broken = "includes are relative to the root of the repository";
      }
      if (!broken.empty()) {
        violations.push_back(from + ":" + std::to_string(include.line) + ": " + include.target + ": " +
                             broken);
      }
    }
  }
  if (files_read != nullptr) *files_read = static_cast<int>(sources.size());
  return violations;
}

}  // namespace dflash::layering
