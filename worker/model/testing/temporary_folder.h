// A folder that is deleted with its contents at the end of the test.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "base/check.h"

namespace dflash {

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "dflashd-test-XXXXXX").string();
    DFLASH_CHECK(mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::string& path() const { return path_; }
  std::string File(const std::string& name) const { return path_ + "/" + name; }
  void Write(const std::string& name, std::string_view bytes) const {
    std::ofstream out(File(name), std::ios::binary | std::ios::trunc);
    out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    DFLASH_CHECK(out.good());
  }
  // A symbolic link to a file elsewhere.
  void Link(const std::string& name, const std::string& target) const {
    std::filesystem::create_symlink(target, File(name));
  }
  // Links to every file of another folder.
  void LinkAll(const std::string& folder) const {
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      Link(entry.path().filename().string(), entry.path().string());
    }
  }

 private:
  std::string path_;
};

}  // namespace dflash
