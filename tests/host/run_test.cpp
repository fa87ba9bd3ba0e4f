// SPDX-License-Identifier: Apache-2.0
// qkvjit-run as a process with no GPU to see: what it computes, says and returns.
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sys/wait.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <string>

#include "qkvjit/qkvjit.h"
#include "qkvjit/safetensors.h"
#include "reference/qkv_reference.h"

namespace {

namespace fs = std::filesystem;
using namespace qkvjit;

constexpr const char* kFixture = QKVJIT_SOURCE_DIR "/tests/data/minilm_layer0.safetensors";

struct Result {
  int code = -1;
  std::string text;  // stdout and stderr
};

Result run(const std::string& arguments) {
  const std::string command = fmt::format("CUDA_VISIBLE_DEVICES= '{}' {} 2>&1 </dev/null", QKVJIT_RUN_TOOL, arguments);
  FILE* pipe = popen(command.c_str(), "r");
  REQUIRE(pipe != nullptr);
  Result result;
  char buffer[4096];
  for (std::size_t n = 0; (n = fread(buffer, 1, sizeof(buffer), pipe)) > 0;) result.text.append(buffer, n);
  const int status = pclose(pipe);
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return result;
}

struct Folder {
  Folder() {
    std::string name = (fs::temp_directory_path() / "qkvjit_run_XXXXXX").string();
    REQUIRE(mkdtemp(name.data()) != nullptr);
    path = name;
  }
  ~Folder() {
    std::error_code error;
    fs::remove_all(path, error);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  [[nodiscard]] std::string file(const char* name) const { return (path / name).string(); }
  fs::path path;
};

void check_refused(const std::string& arguments, const char* message) {
  CAPTURE(arguments);
  const Result result = run(arguments);
  CHECK(result.code == 2);
  CHECK_MESSAGE(result.text.find(message) != std::string::npos, result.text);
}

/// Random small matrices of three widths, as a checkpoint's layer in the order nk8, and as the tool's own names in k8n.
void write_pair(const Folder& folder, bool zero_points) {
  const std::size_t k = 256, m = 3;
  std::mt19937 random(21);
  std::vector<std::uint16_t> x(m * k);
  for (auto& value : x) value = float_to_f16(static_cast<float>(random() % 2000) / 1000.f - 1.f);
  std::vector<std::vector<std::uint32_t>> k8n, nk8;
  std::vector<std::vector<std::uint16_t>> scales;
  std::vector<StoredTensor> own{{"x", "F16", {m, k}, std::as_bytes(std::span(x))}}, checkpoint = own;
  const std::vector<std::uint32_t> zeros(2);
  for (const std::size_t n : {40, 8, 24}) {
    k8n.emplace_back(k / 8 * n);
    for (auto& word : k8n.back()) word = static_cast<std::uint32_t>(random());
    nk8.push_back(pack(unpack(k8n.back(), k, n, WeightLayout::k8n), k, n, WeightLayout::nk8));
    scales.emplace_back(k / 128 * n);
    for (auto& value : scales.back()) value = float_to_f16(0.01f + static_cast<float>(random() % 100) / 1000.f);
  }
  for (std::size_t i = 0; i < 3; ++i) {
    const std::string name(1, "qkv"[i]);
    const std::string long_name = "model.layers.7.self_attn." + name + "_proj";
    const std::uint64_t n = scales[i].size() / 2;
    own.push_back({name + ".qweight", "I32", {k / 8, n}, std::as_bytes(std::span(k8n[i]))});
    own.push_back({name + ".scales", "F16", {k / 128, n}, std::as_bytes(std::span(scales[i]))});
    checkpoint.push_back({long_name + ".qweight", "I32", {n, k / 8}, std::as_bytes(std::span(nk8[i]))});
    checkpoint.push_back({long_name + ".scales", "F16", {k / 128, n}, std::as_bytes(std::span(scales[i]))});
  }
  if (zero_points) {
    checkpoint.push_back({"model.layers.7.self_attn.v_proj.qzeros", "I32", {2, 1}, std::as_bytes(std::span(zeros))});
  }
  write_safetensors(folder.file("own"), own);
  write_safetensors(folder.file("checkpoint"), checkpoint);
}

}  // namespace

TEST_SUITE("run") {
  TEST_CASE("the real layer: outputs are the reference's, close to f32, and the report says how it was made") {
    const Folder folder;
    const Result result = run(fmt::format("'{}' -o '{}' --arch sm_86", kFixture, folder.file("out")));
    CHECK_MESSAGE(result.code == 0, result.text);
    CHECK(result.text.find("no GPU was used, and the numbers below are the CPU reference's") != std::string::npos);
    CHECK(result.text.find("for sm_86: ") != std::string::npos);
    CHECK(result.text.find("0 bytes spilled") != std::string::npos);
    const SafetensorsFile in(kFixture), out(folder.file("out"));
    CHECK(out.tensors().size() == 3);
    CHECK(out.metadata().at("computed_by") == "the CPU reference");
    const std::size_t m = in.at("x").shape[0];
    const auto x = in.at("x").copy<std::uint16_t>();
    for (const std::string name : {"q", "k", "v"}) {
      CAPTURE(name);
      const auto words = in.at(name + ".qweight").copy<std::uint32_t>();
      const auto scales = in.at(name + ".scales").copy<std::uint16_t>();
      const auto expected = in.at(name + ".expected_f32").copy<float>();
      const auto want = qkvref::project(x.data(), m, {words.data(), scales.data(), 384, false}, 384, 128,
                                        qkvref::Arithmetic::rounded);
      const StoredTensor& tensor = out.at(name);
      CHECK(tensor.dtype == "F16");
      CHECK(tensor.shape == std::vector<std::uint64_t>{m, 384});
      const auto got = tensor.copy<std::uint16_t>();
      double error = 0, squares = 0;
      for (std::size_t i = 0; i < got.size(); ++i) {
        REQUIRE(qkvref::accept(got[i], want[i]));
        const double f32 = static_cast<double>(expected[i]);
        error += std::pow(qkvref::f16_to_double(got[i]) - f32, 2);
        squares += f32 * f32;
      }
      CHECK(std::sqrt(error / squares) < 0.15);
      CHECK(std::sqrt(error / squares) > 0.05);  // INT4 is not f32: something else would have been compared
    }
  }

  TEST_CASE("a checkpoint's names and the other layout give the same bits; zero points are refused") {
    const Folder folder;
    write_pair(folder, false);
    const std::string prefix = "--layer-prefix model.layers.7.self_attn";
    CHECK(run(fmt::format("'{}' -o '{}'", folder.file("own"), folder.file("a"))).code == 0);
    CHECK(run(fmt::format("'{}' {} --layout nk8 -o '{}'", folder.file("checkpoint"), prefix, folder.file("b"))).code ==
          0);
    const SafetensorsFile a(folder.file("a")), b(folder.file("b"));
    CHECK(a.at("q").shape[1] == 40);
    CHECK(a.at("k").shape[1] == 8);
    CHECK(a.at("v").shape[1] == 24);
    for (const char* name : {"q", "k", "v"}) CHECK(std::ranges::equal(a.at(name).bytes, b.at(name).bytes));
    check_refused(fmt::format("'{}' {}", folder.file("checkpoint"), prefix), "give --layout nk8");
    check_refused(fmt::format("'{}'", folder.file("checkpoint")), "\"q.qweight\": is not there");
    write_pair(folder, true);
    check_refused(fmt::format("'{}' {} --layout nk8", folder.file("checkpoint"), prefix), "zero points");
  }

  TEST_CASE("usage: exit codes, and errors before work") {
    const Folder folder;
    CHECK(run("--help").code == 0);
    CHECK(run("--help").text.find("Examples:") != std::string::npos);
    CHECK(run("--version").text == fmt::format("qkvjit-run {}\n", version()));
    check_refused("", "input is required");
    check_refused("/no/such/file", "No such file");
    check_refused(fmt::format("'{}' --arch sm_70", kFixture), "--arch");
    check_refused(fmt::format("'{}' --arch sm_200", kFixture), "--arch");
    check_refused(fmt::format("'{}' --tile big", kFixture), "tile");
    check_refused(fmt::format("'{}' --pipeline fast", kFixture), "--pipeline");
    check_refused(fmt::format("'{}' --seed-x 0", kFixture), "--seed-x");
    check_refused(fmt::format("'{}' -o /no/such/folder/file", kFixture), "does not exist");
    const Result seeded = run(fmt::format("'{}' --seed-x 5 -o '{}'", kFixture, folder.file("s")));
    CHECK(seeded.code == 0);
    CHECK(seeded.text.find("x [5, 384]") != std::string::npos);
    CHECK(SafetensorsFile(folder.file("s")).at("v").shape == std::vector<std::uint64_t>{5, 384});
  }
}
