// SPDX-License-Identifier: Apache-2.0
// The embedded device sources are the tree's, byte for byte, and none is left out.
#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>

#include "compile/kernel_templates.h"

namespace {

namespace fs = std::filesystem;

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  REQUIRE_MESSAGE(file.good(), path.string());
  return {std::istreambuf_iterator<char>(file), {}};
}

const fs::path kRoot = QKVJIT_SOURCE_DIR;

fs::path path_of(std::string_view name) {
  return kRoot / (name.starts_with("qkvjit/") ? "include" : "kernel_templates") / name;
}

}  // namespace

TEST_SUITE("embed") {
  TEST_CASE("every embedded file equals the tree's") {
    REQUIRE_FALSE(qkvjit::kernel_templates().empty());
    for (const qkvjit::TemplateFile& file : qkvjit::kernel_templates()) {
      CAPTURE(std::string(file.name));
      const bool equal = file.text == read(path_of(file.name));
      CHECK(equal);
    }
  }

  TEST_CASE("every file of kernel_templates/ is embedded, and the names ascend") {
    std::set<std::string> expected{"qkvjit/specialization.h"};
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(kRoot / "kernel_templates")) {
      const std::string extension = entry.path().extension();
      if (extension != ".h" && extension != ".cu" && extension != ".cuh") continue;
      expected.insert(entry.path().lexically_relative(kRoot / "kernel_templates").generic_string());
    }
    std::set<std::string> embedded;
    for (const qkvjit::TemplateFile& file : qkvjit::kernel_templates()) embedded.emplace(file.name);
    CHECK(embedded == expected);
    CHECK(std::ranges::is_sorted(qkvjit::kernel_templates(), {}, &qkvjit::TemplateFile::name));
  }

  TEST_CASE("the digest has the form of SHA-256") {
    const std::string_view digest = qkvjit::templates_digest();
    CHECK(digest.size() == 64);
    CHECK(digest.find_first_not_of("0123456789abcdef") == std::string_view::npos);
  }
}
