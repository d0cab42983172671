// A pair for tests of the doctor, copies of it with other weights, files and bundles, and what is expected of
// the reports on them.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tools/doctor/doctor.h"
#include "worker/model/safetensors.h"

namespace dflash::doctor {

namespace fs = std::filesystem;

inline const fs::path kSource = DFLASHD_SOURCE_DIR;

inline DoctorOptions Options() {
  DoctorOptions options;
  options.model = kSource / "models/tiny-qwen3.6";
  options.draft_model = kSource / "models/tiny-qwen3.6-dflash";
  options.golden = kSource / "tests/golden";
  options.threads = 1;
  options.max_context_tokens = 1024;
  return options;
}

inline std::vector<std::string> Ids(const Report& report, Outcome outcome) {
  std::vector<std::string> ids;
  for (const Finding& finding : report.findings()) {
    if (finding.outcome == outcome) ids.emplace_back(finding.interface->id);
  }
  return ids;
}

// A folder of this process, gone when the test is.
class Folder {
 public:
  explicit Folder(const std::string& name)
      : path_(fs::path(::testing::TempDir()) / (name + "." + std::to_string(getpid()))) {
    fs::remove_all(path_);
    fs::create_directories(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

inline std::string ReadAll(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}
inline void WriteAll(const fs::path& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary);
  file << bytes;
}

// A copy of the tiny drafter with other weights: `change` gets each tensor's name and elements.
inline void WriteDrafter(
    const fs::path& folder,
    const std::function<void(const StoredTensor& tensor, bf16* elements, int64_t count)>& change) {
  const fs::path source = kSource / "models/tiny-qwen3.6-dflash";
  fs::copy_file(source / "config.json", folder / "config.json");
  std::string bytes = ReadAll(source / "model.safetensors");
  const SafetensorsFile file = SafetensorsFile::Open(source / "model.safetensors").value();
  for (const StoredTensor& tensor : file.tensors()) {
    ASSERT_EQ(tensor.dtype, "BF16");
    std::vector<bf16> elements(static_cast<size_t>(tensor.bytes) / sizeof(bf16));
    std::memcpy(elements.data(), bytes.data() + tensor.offset, static_cast<size_t>(tensor.bytes));
    change(tensor, elements.data(), static_cast<int64_t>(elements.size()));
    std::memcpy(bytes.data() + tensor.offset, elements.data(), static_cast<size_t>(tensor.bytes));
  }
  WriteAll(folder / "model.safetensors", bytes);
}

// A copy of the tiny target in which `change` got the elements of all tensors in bfloat16 whose name ends
// like that.
inline void WriteTarget(const fs::path& folder, const std::string& name,
                        const std::function<void(bf16* elements, int64_t count)>& change) {
  for (const auto& entry : fs::directory_iterator(Options().model)) {
    const fs::path to = folder / entry.path().filename();
    fs::copy_file(entry.path(), to);
    if (to.extension() != ".safetensors") continue;
    std::string bytes = ReadAll(to);
    const SafetensorsFile file = SafetensorsFile::Open(entry.path()).value();
    for (const StoredTensor& tensor : file.tensors()) {
      if (!tensor.name.ends_with(name) || tensor.dtype != "BF16") continue;
      std::vector<bf16> elements(static_cast<size_t>(tensor.bytes) / sizeof(bf16));
      std::memcpy(elements.data(), bytes.data() + tensor.offset, static_cast<size_t>(tensor.bytes));
      change(elements.data(), static_cast<int64_t>(elements.size()));
      std::memcpy(bytes.data() + tensor.offset, elements.data(), static_cast<size_t>(tensor.bytes));
    }
    WriteAll(to, bytes);
  }
}

// A copy of the golden bundle with other JSON, and with other tensors.
using Json = nlohmann::ordered_json;
inline std::string CopyBundle(const Folder& folder,
                              const std::function<void(Json& bundle, Json& prompts)>& change) {
  const fs::path source = kSource / "tests/golden";
  fs::copy_file(source / "golden_tensors.safetensors", folder.path() / "golden_tensors.safetensors");
  Json bundle = Json::parse(ReadAll(source / "bundle.json")),
       prompts = Json::parse(ReadAll(source / "golden.json"));
  change(bundle, prompts);
  WriteAll(folder.path() / "bundle.json", bundle.dump());
  WriteAll(folder.path() / "golden.json", prompts.dump());
  return folder.path();
}

enum class Bundle { kWhole, kWithoutDigests, kWithoutFingerprints, kNone };

// The verdict on a pair; no interface may be blamed.
inline Report Judged(const std::string& drafter, const std::string& target, Bundle with, VerdictKind kind,
                     bool stop = false) {
  DoctorOptions options = Options();
  options.stop_at_first_failure = stop;
  if (!drafter.empty()) options.draft_model = drafter;
  if (!target.empty()) options.model = target;
  options.max_prompts = 5;
  const Folder folder("doctor_bundle");
  if (with == Bundle::kNone) options.golden.clear();
  if (with == Bundle::kWithoutDigests || with == Bundle::kWithoutFingerprints) {
    options.golden = CopyBundle(folder, [&](Json& bundle, Json&) {
      for (const char* key : {"target_digests", "drafter_digests"}) bundle.erase(key);
      if (with == Bundle::kWithoutDigests) return;
      for (const char* key : {"target_weights", "drafter_weights"}) bundle.erase(key);
    });
  }
  absl::StatusOr<Report> report = RunDoctor(options);
  EXPECT_TRUE(report.ok()) << report.status();
  if (!report.ok()) return Report();
  EXPECT_EQ(report->verdict().kind, kind) << report->ToText(false);
  for (const Finding& finding : report->findings()) {
    if (finding.outcome == Outcome::kFail) {
      EXPECT_NE(finding.blame, Blame::kIntegration) << finding.interface->id;
    }
  }
  return *std::move(report);
}

inline void ExpectModelProblem(const std::string& drafter, const std::string& target,
                               const std::string& tensor) {
  const Report report = Judged(drafter, target, Bundle::kWhole, VerdictKind::kModel);
  EXPECT_EQ(report.ExitCode(), 5);
  EXPECT_EQ(report.Of("revisions").outcome, Outcome::kFail);
  EXPECT_THAT(report.Of("revisions").detail, ::testing::HasSubstr(tensor));
  EXPECT_THAT(report.verdict().text, ::testing::HasSubstr("problem of the model"));
}

}  // namespace dflash::doctor
