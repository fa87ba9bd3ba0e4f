// SPDX-License-Identifier: Apache-2.0
// qkvjit-cache as its users see it: output, messages, exit codes.
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cache/artifact_key.h"
#include "cache/bundle.h"
#include "compile/kernel_templates.h"
#include "cuda/nvrtc.h"
#include "qkvjit/error.h"
#include "qkvjit/kernel_cache.h"
#include "tools/problem_list.h"

namespace {

using namespace qkvjit;
using nlohmann::json;
namespace fs = std::filesystem;

struct Result {
  int code = -1;
  std::string out, err;
};

/// A folder of this process, removed at exit.
const fs::path& folder() {
  static const struct Folder {
    fs::path path = fs::temp_directory_path() / fmt::format("qkvjit_cache_tool_test_{}", getpid());
    Folder() { fs::create_directories(path); }
    ~Folder() { fs::remove_all(path); }
  } made;
  return made.path;
}

std::string read(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

std::string write(const char* name, const std::string& text) {
  std::ofstream(folder() / name, std::ios::binary) << text;
  return folder() / name;
}

Result tool(const std::string& arguments, const std::string& environment = "") {
  const std::string out = folder() / "out", err = folder() / "err";
  const int status =
      std::system(fmt::format("{} {} {} > {} 2> {}", environment, QKVJIT_CACHE_TOOL, arguments, out, err).c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read(out), read(err)};
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Rows of no multiple of 16 bytes: only the kernels for unaligned operands.
const std::string kList = R"([{"n_q": 33, "n_k": 17, "n_v": 9, "k": 128}])";

std::vector<Specialization> specs_of(const std::string& list, const char* arch) {
  return tools::specializations_for(tools::parse_problem_list("list", list), {parse_target(arch)});
}

/// A bundle of kList for sm_80, exported once by the tool.
const std::string& bundle() {
  static const std::string kPath = [] {
    const std::string path = folder() / "kernels.qkvb";
    const Result made =
        tool(fmt::format("export --json --problems {} --arch sm_80 -o {}", write("a.json", kList), path));
    REQUIRE_MESSAGE(made.code == 0, made.err);
    const json report = json::parse(made.out);
    CHECK(report["kernels"] == specs_of(kList, "sm_80").size());
    CHECK(report["bytes"] > 1000);
    CHECK(has(made.err, fmt::format("[{0}/{0}] qkv_", specs_of(kList, "sm_80").size())));
    return path;
  }();
  return kPath;
}

CacheOptions with_bundles(std::vector<std::string> paths) {
  CacheOptions options;
  options.bundles = std::move(paths);
  return options;
}

}  // namespace

TEST_SUITE("cache_tool") {
  TEST_CASE("keys: nothing of a specialisation is left out; a key's text is read back") {
    const auto nvrtc = open_nvrtc();
    const Specialization spec = specs_of(kList, "sm_80").front();
    const ArtifactKey key = ArtifactKey::of(spec, *nvrtc);
    CHECK(std::count(key.text().begin(), key.text().end(), '/') == 0);  // no path
    CHECK(key.field("templates") == templates_digest());
    CHECK(key.field("nvrtc") == nvrtc_build(*nvrtc));
    const auto again = ArtifactKey::parse(key.text());
    REQUIRE(again.has_value());
    CHECK(again->digest() == key.digest());
    for (std::size_t size = 0; size < key.text().size(); ++size) {
      const auto cut = ArtifactKey::parse(std::string_view(key.text()).substr(0, size));
      CHECK((!cut.has_value() || cut->digest() != key.digest()));
    }
    Specialization other = spec;
    other.tile.min_blocks += 1;
    const auto differing = differences(key, ArtifactKey::of(other, *nvrtc));
    REQUIRE(differing.size() == 1);
    CHECK(differing[0].name == "tile.min_blocks");
    other = spec;
    other.target.suffix = 'a';
    REQUIRE(differences(key, ArtifactKey::of(other, *nvrtc)).size() == 1);
  }

  TEST_CASE("a cache with the bundle alone compiles nothing; its kernels are those that a compile makes") {
    KernelCache cache(with_bundles({bundle()}));
    const auto specs = specs_of(kList, "sm_80");
    for (const Specialization& spec : specs) CHECK(cache.compile(spec)->spec == spec);
    CHECK(cache.stats().compiles == 0);
    CHECK(cache.stats().bundle_hits == specs.size());
    CHECK(cache.stats().bundle_rejected == 0);
    const auto stored = cache.compile(specs.front()), made = KernelCache().compile(specs.front());
    CHECK(stored->ptx == made->ptx);
    CHECK(stored->cubin == made->cubin);
    CHECK(stored->lowered_name == made->lowered_name);
    CHECK(stored->options == made->options);
    CHECK(stored->nvrtc_version == made->nvrtc_version);
    CHECK(stored->registers == made->registers);
    CHECK(stored->static_smem_bytes == made->static_smem_bytes);
    // Another target is another key.
    Specialization other = specs.front();
    other.target.sm = 86;
    CHECK(cache.compile(other)->spec == other);
    CHECK(cache.stats().compiles == 1);
  }

  TEST_CASE("a bundle that cannot be used never fails a call") {
    const Specialization spec = specs_of(kList, "sm_80").front();
    const Bundle good = Bundle::open(bundle());
    const std::string damaged = folder() / "damaged.qkvb", foreign = folder() / "foreign.qkvb";
    std::string bytes = read(bundle());
    const auto key = ArtifactKey::of(spec, *open_nvrtc());
    REQUIRE(good.find(key.digest()) != nullptr);
    bytes[good.find(key.digest())->offset + 100] ^= 1;
    write("damaged.qkvb", bytes);
    BundleProducer producer = good.producer();
    producer.templates_digest[0] ^= 1;
    write_bundle(foreign, {}, producer);
    // The entry of another key under this one's name.
    const std::string swapped = folder() / "swapped.qkvb";
    const Bundle::Item* other = &good.items().front();
    if (other->key == key.digest()) other = &good.items().back();
    write_bundle(swapped, {{key.digest(), good.read(*other)}}, good.producer());
    for (const std::string& path : {damaged, foreign, swapped, std::string("/nonexistent.qkvb")}) {
      CAPTURE(path);
      KernelCache cache(with_bundles({path}));
      CHECK(cache.compile(spec)->spec == spec);
      CHECK(cache.stats().compiles == 1);
      CHECK(cache.stats().bundle_hits == 0);
      CHECK(cache.stats().bundle_rejected == 1);
    }
    KernelCache both(with_bundles({damaged, bundle()}));
    CHECK(both.compile(spec)->spec == spec);
    CHECK(both.stats().compiles == 0);
    CHECK(both.stats().bundle_rejected == 1);
  }

  TEST_CASE("list and stat, as text and as JSON") {
    const Bundle opened = Bundle::open(bundle());
    const Result text = tool("list " + bundle());
    CHECK(text.code == 0);
    CHECK(std::count(text.out.begin(), text.out.end(), '\n') == static_cast<long>(opened.items().size()));
    CHECK(has(text.out, "K = 128, N = 33+17+9"));
    const json list = json::parse(tool("list --json " + bundle()).out);
    REQUIRE(list.size() == opened.items().size());
    CHECK(list[0]["name"] == to_hex(opened.items()[0].key));
    CHECK(list[0]["fields"]["target"] == "sm_80");
    CHECK(has(tool("stat " + bundle()).out, templates_digest().data()));
    const json stat = json::parse(tool("--json stat " + bundle()).out);
    CHECK(stat["entries"] == opened.items().size());
    CHECK(stat["nvrtc"] == opened.producer().nvrtc_version);
  }

  TEST_CASE("verify: exit code 0, or 1 with the entry that is bad") {
    CHECK(tool("verify " + bundle()).code == 0);
    std::string bytes = read(bundle());
    const Bundle opened = Bundle::open(bundle());
    bytes[opened.items()[1].offset + 50] ^= 4;
    const std::string bad = write("bad.qkvb", bytes);
    const Result text = tool("verify " + bad);
    CHECK(text.code == 1);
    CHECK(has(text.out, to_hex(opened.items()[1].key)));
    const json report = json::parse(tool("verify --json " + bad).out);
    CHECK(report["bad"] == 1);
    CHECK(report["good"] == opened.items().size() - 1);
    CHECK(report["faults"][0]["name"] == to_hex(opened.items()[1].key));
    // An entry under another key's name.
    const std::string swapped = folder() / "renamed.qkvb";
    write_bundle(swapped, {{opened.items()[0].key, opened.read(opened.items()[1])}}, opened.producer());
    const Result renamed = tool("verify " + swapped);
    CHECK(renamed.code == 1);
    CHECK(has(renamed.out, "is of another key"));
  }

  TEST_CASE("why: what is missing and which fields differ from the nearest stored key") {
    const std::string problems = write("a.json", kList);
    const Result all = tool(fmt::format("why {} --problems {} --arch sm_80", bundle(), problems));
    CHECK(all.code == 0);
    CHECK(has(all.out, "are there"));
    const Result none = tool(fmt::format("why {} --problems {} --arch sm_86 --json", bundle(), problems));
    CHECK(none.code == 1);
    const json report = json::parse(none.out);
    CHECK(report["missing"].size() == report["needed"]);
    bool target_alone = false;
    for (const json& miss : report["missing"]) {
      const json& fields = miss["differences"];
      target_alone = target_alone || fields == json::parse(R"([{"field":"target","stored":"sm_80","needed":"sm_86"}])");
    }
    CHECK(target_alone);
    // A bundle of other templates and another NVRTC says so first.
    const std::string foreign = folder() / "old.qkvb";
    write_bundle(foreign, {}, {"0.0.1", std::string(64, '0'), "12.9.41"});
    const Result old = tool(fmt::format("why {} --problems {} --arch sm_80", foreign, problems));
    CHECK(old.code == 1);
    CHECK(has(old.out, "templates digest: the bundle has 0000"));
    CHECK(has(old.out, "NVRTC version: the bundle has 12.9.41"));
    CHECK(has(old.out, "nothing is stored"));
  }

  TEST_CASE("the folder: import, list, stat, verify, why, trim and clear") {
    const std::size_t count = Bundle::open(bundle()).items().size();
    const fs::path disk = folder() / "disk";
    const std::string dir = " --dir " + disk.string();
    const auto run = [&](const std::string& arguments) { return tool(arguments + dir + " --json"); };
    const json imported = json::parse(run("import " + bundle()).out);
    CHECK(imported["stored"] == count);
    CHECK(imported["bad"] == 0);
    CHECK(imported["directory"] == disk.string());
    CHECK(has(tool("import " + bundle() + dir).out, fmt::format("{} entries stored, 0 not written, 0 bad", count)));

    // What was imported is found by a cache with that folder.
    CacheOptions options;
    options.directory = disk;
    KernelCache cache(options);
    for (const Specialization& spec : specs_of(kList, "sm_80")) CHECK(cache.compile(spec)->spec == spec);
    CHECK(cache.stats().compiles == 0);
    CHECK(cache.stats().disk.hits == count);

    const json list = json::parse(run("list").out);
    REQUIRE(list.size() == count);
    for (const json& entry : list) {
      CHECK(entry["fields"]["target"] == "sm_80");
      CHECK(entry["last_use"].get<std::string>().size() == 20);
      CHECK_FALSE(entry.contains("fault"));
    }
    CHECK(has(tool("list" + dir).out, "K = 128, N = 33+17+9"));
    const json stat = json::parse(run("stat").out);
    CHECK(stat["entries"] == count);
    CHECK(stat["bytes"] > 1000);
    CHECK(tool("why" + dir + " --arch sm_80 --problems " + write("a.json", kList)).code == 0);
    const Result why = run("why --arch sm_86 --problems " + write("a.json", kList));
    CHECK(why.code == 1);
    CHECK(json::parse(why.out)["missing"].size() == count);

    // A damaged entry is named, removed, and gone at the second look.
    const std::string name = list[0]["name"];
    CHECK(run("verify").code == 0);
    fs::path file;
    for (const auto& entry : fs::recursive_directory_iterator(disk)) {
      if (has(entry.path().filename(), name)) file = entry.path();
    }
    REQUIRE_FALSE(file.empty());
    std::string bytes = read(file);
    bytes[bytes.size() / 2] ^= 1;
    std::ofstream(file, std::ios::binary) << bytes;
    CHECK(has(tool("list" + dir).out, "checksum"));
    const Result damaged = run("verify");
    CHECK(damaged.code == 1);
    CHECK(json::parse(damaged.out)["faults"][0]["name"] == name);
    CHECK(json::parse(run("verify").out) ==
          json::parse(fmt::format(R"({{"good":{},"bad":0,"faults":[]}})", count - 1)));

    CHECK(json::parse(run("import " + bundle()).out)["stored"] == count);  // the damaged one is back
    const std::uint64_t most = json::parse(run("stat").out)["bytes"].get<std::uint64_t>() - 1;
    const json trimmed = json::parse(run(fmt::format("trim --max-bytes {}", most)).out);
    CHECK(trimmed["removed"] > 0);
    const json left = json::parse(run("stat").out);
    CHECK(left["bytes"] <= most);
    CHECK(left["entries"] > 0);
    CHECK(left["entries"] == count - trimmed["removed"].get<std::size_t>());
    CHECK(json::parse(run("trim --max-bytes 1GiB").out)["removed"] == 0);
    CHECK(json::parse(run("clear").out)["removed"] == left["entries"]);
    CHECK(json::parse(run("list").out).empty());
  }

  TEST_CASE("import: a bad entry is left out and named; a bundle of another build is said to be one") {
    const Bundle opened = Bundle::open(bundle());
    const auto& items = opened.items();
    const std::string mixed = folder() / "mixed.qkvb";
    write_bundle(mixed, {{items[0].key, opened.read(items[1])}, {items[1].key, opened.read(items[1])}},
                 {"0.0.1", std::string(64, '0'), "12.9.41"});
    const Result result = tool("import --json " + mixed + " --dir " + (folder() / "mixed").string());
    CHECK(result.code == 1);
    const json report = json::parse(result.out);
    CHECK(report["stored"] == 1);
    REQUIRE(report["bad"] == 1);
    CHECK(report["faults"][0]["name"] == to_hex(items[0].key));
    CHECK(has(result.err, "templates digest: the bundle has 0000"));
  }

  TEST_CASE("warm: compiled to the folder, found the second time; the environment names the folder") {
    const fs::path disk = folder() / "warm";
    const std::string command = "warm --json --arch sm_80 --problems " + write("a.json", kList);
    const std::string environment = "QKVJIT_CACHE_DIR=" + disk.string();
    const std::size_t count = specs_of(kList, "sm_80").size();
    const json first = json::parse(tool(command, environment).out);
    CHECK(first["directory"] == disk.string());
    CHECK(first["compiled"] == count);
    CHECK(first["stored"] == count);
    CHECK(json::parse(tool("stat --json --dir " + disk.string()).out)["entries"] == count);
    const Result second = tool(command, environment);
    CHECK(second.code == 0);
    CHECK(json::parse(second.out)["compiled"] == 0);
    CHECK(json::parse(second.out)["found"] == count);
  }

  TEST_CASE("a folder that cannot be used: exit code 2 and the reason") {
    const std::string file = write("file", "x");
    for (const char* command : {"list", "stat", "verify", "clear", "trim --max-bytes 1"}) {
      const Result result = tool(fmt::format("{} --dir {}", command, file));
      CAPTURE(command);
      CHECK(result.code == 2);
      CHECK(result.out.empty());
      CHECK(has(result.err, file));
    }
    const Result none = tool("list", "QKVJIT_CACHE_DIR=");
    CHECK(none.code == 2);
    CHECK(has(none.err, "--dir"));
  }

  TEST_CASE("help, version and wrong usage: exit code 2, the reason on stderr, nothing on stdout") {
    CHECK(tool("--help").code == 0);
    CHECK(has(tool("--help").out, "problems.json"));
    CHECK(has(tool("--version").out, "qkvjit-cache 0."));
    const std::string problems = write("a.json", kList);
    for (const auto& [arguments, reason] :
         {std::pair<std::string, std::string>{"", "subcommand"},
          {"shrink", "shrink"},
          {"list x.qkvb --dir y", "--dir"},
          {"trim", "--max-bytes"},
          {"trim --max-bytes lots", "lots"},
          {"import", "bundle"},
          {"warm", "--problems"},
          {"warm --arch sm_80 --device 0 --problems " + problems, "--device"},
          {"warm --multiprocessors 3 --problems " + problems, "--arch"},
          {"why", "--problems"},
          {"list /nonexistent.qkvb", "/nonexistent.qkvb"},
          {"verify " + problems, "needs at least 96"},
          {"export -o x --arch sm_80", "--problems"},
          {"export -o x --problems " + problems, "--arch"},
          {"export --arch sm_80 --problems " + problems, "--output"},
          {"export -o x --arch sm_75 --problems " + problems, "sm_80"},
          {"export -o x --arch volta --problems " + problems, "sm_NN"},
          {"export -o x --arch sm_80 --multiprocessors 0 --problems " + problems, "--multiprocessors"},
          {"export -o x --arch sm_80 --problems /nonexistent.json", "/nonexistent.json"},
          {"export -o x --arch sm_80 --problems " + write("bad.json", "[{}]"), "problems[0].k"},
          {"export -o /nonexistent/x.qkvb --arch sm_80 --problems " + problems, "/nonexistent/x.qkvb"}}) {
      const Result result = tool(arguments);
      CAPTURE(arguments);
      CAPTURE(result.err);
      CHECK(result.code == 2);
      CHECK(result.out.empty());
      CHECK(has(result.err, reason));
    }
  }

  TEST_CASE("no NVRTC: exit code 3") {
    const Result result = tool(fmt::format("export -o x --arch sm_80 --problems {}", write("a.json", kList)),
                               "QKVJIT_NVRTC=/nonexistent/libnvrtc.so.13");
    CHECK(result.code == 3);
    CHECK(has(result.err, "/nonexistent/libnvrtc.so.13"));
  }
}
