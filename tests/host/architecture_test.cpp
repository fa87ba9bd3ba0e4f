// SPDX-License-Identifier: Apache-2.0
// Reads the #include lines of the tree and holds the order of its folders: each may use itself and those before it.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;

const fs::path kRoot = QKVJIT_SOURCE_DIR;

// In call order. A public header counts with the folder that implements it.
constexpr std::array kFolders{"support", "quantize", "cuda", "select",    "compile",
                              "cache",   "launch",   "tune", "checkpoint"};

struct PublicHeader {
  const char* name;
  const char* folder;  // "" is before every folder
};
constexpr std::array<PublicHeader, 16> kPublicHeaders{{
    {"qkvjit/error.h", ""},
    {"qkvjit/specialization.h", ""},
    {"qkvjit/tensor.h", ""},
    // Plain facts and declarations over the three above; select/ needs DeviceInfo, cuda/ reports PointerFacts.
    {"qkvjit/qkv_problem.h", ""},
    {"qkvjit/device_context.h", ""},
    {"qkvjit/quantize.h", "quantize"},
    {"qkvjit/select.h", "select"},
    {"qkvjit/tuning_table.h", "select"},
    {"qkvjit/prepare.h", "cache"},
    {"qkvjit/kernel_cache.h", "cache"},
    {"qkvjit/remote_cache.h", "cache"},
    {"qkvjit/prepack.h", "launch"},
    {"qkvjit/qkv_plan.h", "launch"},
    {"qkvjit/qkvjit.h", "launch"},
    {"qkvjit/tune.h", "tune"},
    {"qkvjit/safetensors.h", "checkpoint"},
}};

// The umbrella header is included where its last functions are defined. Compiled artifacts are described in
// kernel_cache.h, which is plain data to compile/.
struct Exception {
  const char* file;
  const char* header;
};
constexpr std::array<Exception, 3> kExceptions{{
    {"src/support/version.cpp", "qkvjit/qkvjit.h"},
    {"src/cache/bundle_set.cpp", "qkvjit/qkvjit.h"},  // version()
    {"src/compile/", "qkvjit/kernel_cache.h"},
}};

int rank_of(std::string_view folder) {
  if (folder.empty()) return -1;
  const auto* found = std::ranges::find_if(kFolders, [&](const char* name) { return folder == name; });
  return found == kFolders.end() ? -2 : static_cast<int>(found - kFolders.begin());
}

struct Include {
  std::string name;
  bool quoted = false;
};

std::vector<Include> includes_of(const std::string& text) {
  std::vector<Include> includes;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t hash = line.find_first_not_of(" \t");
    if (hash == std::string::npos || line[hash] != '#') continue;
    const std::size_t word = line.find_first_not_of(" \t", hash + 1);
    if (word == std::string::npos || line.compare(word, 7, "include") != 0) continue;
    const std::size_t open = line.find_first_of("\"<", word + 7);
    if (open == std::string::npos) continue;
    const std::size_t close = line.find_first_of("\">", open + 1);
    if (close != std::string::npos) includes.push_back({line.substr(open + 1, close - open - 1), line[open] == '"'});
  }
  return includes;
}

struct SourceFile {
  std::string path;  // from the root
  std::vector<Include> includes;
};

std::vector<SourceFile> files_under(const char* folder) {
  std::vector<SourceFile> files;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(kRoot / folder)) {
    static const std::set<std::string> kExtensions{".h", ".cpp", ".cu", ".cuh"};
    if (!kExtensions.contains(entry.path().extension())) continue;
    std::ifstream stream(entry.path(), std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(stream), {}};
    files.push_back({entry.path().lexically_relative(kRoot).generic_string(), includes_of(text)});
  }
  std::ranges::sort(files, {}, &SourceFile::path);
  return files;
}

bool starts_with(const std::string& text, std::string_view prefix) { return text.rfind(prefix, 0) == 0; }

/// Empty where `file`, which lies in src/, may include `name`; else what is wrong.
std::string refusal(const std::string& file, const std::string& name) {
  for (const Exception& exception : kExceptions) {
    if (starts_with(file, exception.file) && name == exception.header) return {};
  }
  const std::string own = file.substr(4, file.find('/', 4) - 4);
  const int own_rank = rank_of(own);
  if (own_rank == -2) return "lies in the folder '" + own + "', which has no place in the order";
  if (name == "kernel_templates/qkv_params.h") {
    return own == "launch" ? "" : "only launch/ shares the kernel's argument";
  }
  std::string folder;
  if (starts_with(name, "qkvjit/")) {
    const auto* header =
        std::ranges::find_if(kPublicHeaders, [&](const PublicHeader& candidate) { return name == candidate.name; });
    if (header == kPublicHeaders.end()) return "includes " + name + ", which is no public header of the list";
    folder = header->folder;
  } else {
    folder = name.substr(0, name.find('/'));
  }
  const int rank = rank_of(folder);
  if (rank == -2) return "includes " + name + ", which is of no folder of src/";
  if (rank > own_rank) return "includes " + name + ", which comes after " + own + "/ in the order";
  return {};
}

}  // namespace

TEST_SUITE("architecture") {
  TEST_CASE("the reader of #include lines and the rule itself can fail") {
    const std::vector<Include> includes =
        includes_of("#include \"a/b.h\"\n  #  include <vector> // x\n// #include \"c\"\n");
    REQUIRE(includes.size() == 2);
    CHECK(includes[0].name == "a/b.h");
    CHECK(includes[0].quoted);
    CHECK(includes[1].name == "vector");
    CHECK_FALSE(includes[1].quoted);

    CHECK(refusal("src/cuda/driver.cpp", "support/log.h").empty());
    CHECK(refusal("src/launch/plan.cpp", "cuda/device_state.h").empty());
    CHECK(refusal("src/compile/compiler.h", "qkvjit/kernel_cache.h").empty());
    CHECK_FALSE(refusal("src/cuda/driver.cpp", "select/tile_table.h").empty());
    CHECK_FALSE(refusal("src/select/select.cpp", "qkvjit/kernel_cache.h").empty());
    CHECK_FALSE(refusal("src/cache/kernel_cache.cpp", "checkpoint/gptq.h").empty());
    CHECK_FALSE(refusal("src/other/file.cpp", "support/log.h").empty());
    CHECK_FALSE(refusal("src/cache/kernel_cache.cpp", "reference/qkv_reference.h").empty());
    CHECK_FALSE(refusal("src/cuda/driver.cpp", "qkvjit/unknown.h").empty());
  }

  TEST_CASE("src/: a folder uses only itself and those before it") {
    const std::vector<SourceFile> files = files_under("src");
    REQUIRE(files.size() > 15);
    for (const SourceFile& file : files) {
      for (const Include& include : file.includes) {
        if (!include.quoted) continue;
        const std::string problem = refusal(file.path, include.name);
        CHECK_MESSAGE(problem.empty(), file.path << " " << problem);
      }
    }
  }

  TEST_CASE("include/: public headers need only each other and the standard library") {
    for (const SourceFile& file : files_under("include")) {
      const bool listed = std::ranges::any_of(kPublicHeaders, [&](const PublicHeader& header) {
        return file.path == std::string("include/") + header.name;
      });
      CHECK_MESSAGE(listed, file.path << " is missing from this test's list");
      for (const Include& include : file.includes) {
        const bool plain = include.quoted ? starts_with(include.name, "qkvjit/")
                                          : include.name.find_first_of("./") == std::string::npos;
        CHECK_MESSAGE(plain, file.path << " includes " << include.name);
      }
    }
  }

  TEST_CASE("kernel_templates/: only each other and specialization.h, by the names NVRTC is given") {
    const std::vector<SourceFile> files = files_under("kernel_templates");
    REQUIRE(files.size() >= 4);
    for (const SourceFile& file : files) {
      for (const Include& include : file.includes) {
        const bool known =
            include.name == "qkvjit/specialization.h" || fs::exists(kRoot / "kernel_templates" / include.name);
        CHECK_MESSAGE((include.quoted && known), file.path << " includes " << include.name);
      }
    }
  }

  TEST_CASE("specialization.h includes nothing") {
    for (const SourceFile& file : files_under("include")) {
      if (file.path == "include/qkvjit/specialization.h") CHECK(file.includes.empty());
    }
  }

  TEST_CASE("reference/: nothing of the product and nothing of CUDA") {
    const std::vector<SourceFile> files = files_under("reference");
    REQUIRE(files.size() >= 2);
    for (const SourceFile& file : files) {
      for (const Include& include : file.includes) {
        const bool own = include.name == "qkv_reference.h" || include.name == "reference/qkv_reference.h";
        const bool standard = !include.quoted && include.name.find_first_of("./") == std::string::npos;
        CHECK_MESSAGE((own || standard), file.path << " includes " << include.name);
      }
    }
  }

  TEST_CASE("the product uses neither the reference nor tests nor tools") {
    for (const char* folder : {"src", "include"}) {
      for (const SourceFile& file : files_under(folder)) {
        for (const Include& include : file.includes) {
          for (const char* other : {"reference/", "tests/", "tools/", "qkv_reference"}) {
            CHECK_MESSAGE(!starts_with(include.name, other), file.path << " includes " << include.name);
          }
        }
      }
    }
  }
}
