// SPDX-License-Identifier: Apache-2.0
// qkvjit-dump as its users see it: output, messages, exit codes.
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>

namespace {

namespace fs = std::filesystem;

struct Result {
  int code = -1;
  std::string out, err;
};

/// A folder of this process, removed at exit.
const fs::path& folder() {
  static const struct Folder {
    fs::path path = fs::temp_directory_path() / fmt::format("qkvjit_dump_test_{}", getpid());
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

Result dump(const std::string& arguments, const std::string& environment = "") {
  const std::string out = folder() / "out", err = folder() / "err";
  const int status =
      std::system(fmt::format("{} {} {} > {} 2> {}", environment, QKVJIT_DUMP_TOOL, arguments, out, err).c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read(out), read(err)};
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

const std::string kShape = "--n 96 --k 256 ";

}  // namespace

TEST_SUITE("dump") {
  TEST_CASE("PTX: the default, for the architecture asked for, the same run after run") {
    const Result first = dump(kShape + "--m 1 --arch sm_80");
    CHECK(first.code == 0);
    CHECK(contains(first.out, ".target sm_80"));
    CHECK(contains(first.out, "mma.sync.aligned.m16n8k32"));  // one token: 8-bit integers
    CHECK(contains(dump(kShape + "--m 8 --arch sm_80").out, "mma.sync.aligned.m16n8k16"));
    CHECK(first.err.empty());
    CHECK(dump(kShape + "--m 1 --arch sm_80 --emit ptx").out == first.out);
    CHECK(dump(kShape + "--m 1 --arch sm_80 --layout nk8").out != first.out);
    CHECK(contains(dump(kShape + "--m 1 --arch sm_121").out, ".target sm_121"));
  }

  TEST_CASE("info: registers, spills, shared memory, threads, PTX ISA, NVRTC") {
    const Result info = dump(kShape + "--m 1000 --emit info");
    CHECK(info.code == 0);
    for (const char* line :
         {"registers per thread", "spill bytes", "shared memory bytes", "threads per block", "PTX ISA", "NVRTC",
          "qkv_mma_sync", "target                 sm_90", "n_q                  96"}) {
      CHECK_MESSAGE(contains(info.out, line), line);
    }
  }

  TEST_CASE("cubin and -o: an ELF file, whole, and nothing else left behind") {
    const fs::path file = folder() / "kernel.cubin";
    CHECK(dump(kShape + "--emit cubin -o " + file.string()).code == 0);
    CHECK(read(file).substr(1, 3) == "ELF");
    for (const auto& entry : fs::directory_iterator(folder())) CHECK_FALSE(contains(entry.path().string(), ".tmp"));
    CHECK(dump(kShape + "--emit cubin").out == read(file));
    const Result bad = dump(kShape + "-o /nonexistent/folder/x.ptx");
    CHECK(bad.code == 2);
    CHECK(contains(bad.err, "/nonexistent/folder/x.ptx"));
  }

  TEST_CASE("source, and the nvcc line, which works where nvcc is") {
    const Result source = dump(kShape + "--pipeline simple --emit source");
    CHECK(source.code == 0);
    CHECK(contains(source.out, "qkv_simple("));
    CHECK_FALSE(contains(source.out, "#include"));
    const Result line = dump("--n-q 96 --n-k 32 --n-v 64 --k 256 --m 5 --layout nk8 --arch sm_86 --emit nvcc");
    CHECK(line.code == 0);
    CHECK(contains(line.out, "nvcc -std=c++20"));
    CHECK(contains(line.out, "--n-q 96 --n-k 32 --n-v 64"));
    if (std::system("nvcc --version > /dev/null 2>&1") != 0) {
      std::cout << "SKIPPED: nvcc is not on PATH, its command line is not tried\n";
      return;
    }
    const std::string here = fs::path(QKVJIT_DUMP_TOOL).parent_path();
    const std::string command =
        fmt::format("cd {} && PATH={}:$PATH && {}", folder().string(), here, line.out.substr(0, line.out.find('\n')));
    CHECK(std::system((command + " > nvcc.log 2>&1").c_str()) == 0);
    CHECK(fs::exists(folder() / "kernel.cubin"));
  }

  TEST_CASE("sass where a disassembler is; elsewhere it says what to install") {
    const Result sass = dump(kShape + "--m 8 --emit sass");
    if (sass.code == 3) {
      CHECK(contains(sass.err, "nvidia-cuda-nvdisasm"));
      std::cout << "SKIPPED: no disassembler on this machine\n";
    } else {
      CHECK(sass.code == 0);
      CHECK(contains(sass.out, "HMMA.16816"));
    }
    const Result none = dump(kShape + "--emit sass", "env -u CUDA_HOME -u CUDA_PATH -u VIRTUAL_ENV PATH=/nonexistent");
    CHECK((none.code == 3 || none.code == 0));  // /usr/local/cuda is looked into as well
  }

  TEST_CASE("list: every tile with the M it serves; a tile of the list is accepted") {
    const Result list = dump("--list --n 4096 --k 4096 --arch sm_90");
    CHECK(list.code == 0);
    for (const char* part : {"gemv", "decode", "mma_sync", "simple", "2-8", "...", "any"})
      CHECK_MESSAGE(contains(list.out, part), part);
    const std::size_t at = list.out.find("m64n96");
    REQUIRE(at != std::string::npos);
    const std::string tile = list.out.substr(at, list.out.find(' ', at) - at);
    CHECK(contains(dump(kShape + "--tile " + tile + " --emit info").out, tile));
  }

  TEST_CASE("help and version") {
    const Result help = dump("--help");
    CHECK(help.code == 0);
    CHECK(contains(help.out, "Examples:"));
    CHECK(contains(dump("--version").out, "qkvjit-dump 0."));
  }

  TEST_CASE("wrong input: exit code 2, the reason on stderr, nothing on stdout") {
    for (const auto& [arguments, reason] : {std::pair<std::string, std::string>{"--n 64", "--k"},
                                            {"--n 64 --k 100", "128"},
                                            {"--k 128", "n_q"},
                                            {kShape + "--arch sm_75", "sm_80"},
                                            {kShape + "--arch volta", "sm_NN"},
                                            {kShape + "--arch sm_99", "9.9"},
                                            {kShape + "--tile nonsense", "--list"},
                                            {kShape + "--tile m8n8_w1x1x1_s1_b1", "--list"},
                                            {kShape + "--emit elf", "elf"},
                                            {kShape + "--layout kn", "kn"},
                                            {kShape + "--m -1", "-1"},
                                            {kShape + "--m 1 --tile m8n32_w1x1x4_s2_b4", "--tile"}}) {
      const Result result = dump(arguments);
      CAPTURE(arguments);
      CAPTURE(result.err);
      CHECK(result.code == 2);
      CHECK(result.out.empty());
      CHECK(contains(result.err, reason));
    }
  }

  TEST_CASE("no NVRTC: exit code 3, and what to install") {
    const Result result = dump(kShape, "QKVJIT_NVRTC=/nonexistent/libnvrtc.so.13");
    CHECK(result.code == 3);
    CHECK(contains(result.err, "/nonexistent/libnvrtc.so.13"));
    CHECK(contains(result.err, "nvidia-cuda-nvrtc"));
  }
}
