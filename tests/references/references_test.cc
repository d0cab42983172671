// What comments and pages refer to exists: pages under docs/ and their sections, targets of relative links.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::string ReadText(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Files of the repository with one of these extensions.
std::vector<fs::path> Files(const std::set<std::string>& extensions) {
  const std::set<std::string> skipped = {"build", ".git", ".cache", ".bundle", "node_modules", "third_party"};
  std::vector<fs::path> files;
  for (auto it = fs::recursive_directory_iterator(DFLASHD_SOURCE_DIR);
       it != fs::recursive_directory_iterator(); ++it) {
    if (it->is_directory() && skipped.contains(it->path().filename().string())) {
      it.disable_recursion_pending();
    } else if (it->is_regular_file() && extensions.contains(it->path().extension().string())) {
      files.push_back(it->path());
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

// A reference in a comment: a page, and one of its sections if the comment names one.
struct Reference {
  std::string page;
  std::string section;
  bool operator==(const Reference&) const = default;
};

// Finds `docs/x.md "Section", "Other section"`; a comment may break anywhere between words.
std::vector<Reference> FindReferences(const std::string& source) {
  // Comment marks at the beginnings of lines go, so that a reference lies on one line.
  const std::string text = std::regex_replace(source, std::regex(R"(\s*\n\s*(//|#)\s*)"), " ");
  static const std::regex pattern(R"re((docs/[A-Za-z0-9_./-]+\.md)((?:[,\s]+"[^"\n]+")*))re");
  std::vector<Reference> references;
  for (std::sregex_iterator it(text.begin(), text.end(), pattern), end; it != end; ++it) {
    const std::string sections = (*it)[2];
    references.push_back({(*it)[1], ""});
    static const std::regex quoted(R"re("([^"]+)")re");
    for (std::sregex_iterator section(sections.begin(), sections.end(), quoted); section != end; ++section) {
      references.push_back({(*it)[1], (*section)[1]});
    }
  }
  return references;
}

bool HasSection(const std::string& page, const std::string& section) {
  std::istringstream lines(page);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("#") && line.substr(line.find_first_not_of("# ")) == section) return true;
  }
  return false;
}

TEST(References, FindsPagesAndSectionsAcrossLines) {
  EXPECT_THAT(
      FindReferences("// Source: docs/spec/a.md \"One\n// two\",\n//   \"Three\". And docs/b.md says\n"),
      ElementsAre(Reference{"docs/spec/a.md", ""}, Reference{"docs/spec/a.md", "One two"},
                  Reference{"docs/spec/a.md", "Three"}, Reference{"docs/b.md", ""}));
  EXPECT_TRUE(HasSection("# A\n## One two\ntext\n", "One two"));
  EXPECT_FALSE(HasSection("# A\n## One two\ntext\n", "text"));
}

TEST(References, CommentsPointAtPagesAndSectionsThatExist) {
  std::vector<std::string> broken;
  int found = 0;
  for (const fs::path& path : Files({".h", ".cc", ".cu", ".cuh", ".proto", ".txt", ".cmake", ".mjs"})) {
    const std::string name = path.lexically_relative(DFLASHD_SOURCE_DIR).string();
    if (name.starts_with("tests/references/")) continue;
    for (const Reference& reference : FindReferences(ReadText(path))) {
      ++found;
      const fs::path page = fs::path(DFLASHD_SOURCE_DIR) / reference.page;
      if (!fs::exists(page)) {
        broken.push_back(name + ": no page " + reference.page);
      } else if (!reference.section.empty() && !HasSection(ReadText(page), reference.section)) {
        broken.push_back(name + ": no section \"" + reference.section + "\" in " + reference.page);
      }
    }
  }
  EXPECT_THAT(broken, IsEmpty());
  EXPECT_GT(found, 20);
}

TEST(References, LinksOfPagesLeadSomewhere) {
  std::vector<std::string> broken;
  int found = 0;
  static const std::regex link(R"(\]\(([^)#:]+)(?:#[^)]*)?\))");
  for (const fs::path& path : Files({".md"})) {
    const std::string text = ReadText(path);
    for (std::sregex_iterator it(text.begin(), text.end(), link), end; it != end; ++it) {
      ++found;
      const std::string target = (*it)[1];
      if (!fs::exists(path.parent_path() / target)) broken.push_back(path.string() + ": " + target);
    }
  }
  EXPECT_THAT(broken, IsEmpty());
  EXPECT_GT(found, 10);
}

}  // namespace
}  // namespace dflash
