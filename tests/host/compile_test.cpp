// SPDX-License-Identifier: Apache-2.0
// Every tile of every architecture that this NVRTC knows, compiled for real: no GPU is needed for that. NVRTC's own log
// tells registers and spills. The templates come from memory alone, so the include path is empty.
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <mutex>
#include <set>
#include <thread>

#include "compile/compiler.h"
#include "compile/kernel_templates.h"
#include "compile/name_expression.h"
#include "cuda/nvrtc.h"
#include "qkvjit/error.h"
#include "qkvjit/select.h"

using namespace qkvjit;

namespace {

const NvrtcTable& nvrtc() {
  static const std::shared_ptr<const NvrtcTable> table = open_nvrtc();
  return *table;
}

/// The architectures whose shared memory is known, of those that NVRTC generates code for.
std::vector<unsigned> architectures() {
  std::vector<unsigned> known;
  for (const unsigned sm : {80u, 86u, 87u, 88u, 89u, 90u, 100u, 103u, 110u, 120u, 121u}) {
    const auto& targets = nvrtc().targets;
    if (std::find(targets.begin(), targets.end(), sm) != targets.end()) known.push_back(sm);
  }
  return known;
}

Specialization small_spec() {
  const QkvProblem problem{.n_q = 96, .n_k = 32, .n_v = 64, .k = 256};
  return select_specialization(problem, typical_device(80), {.sm = 80}, true, 2);
}

/// A spilled word or two of a tile that fills all 255 registers costs nothing that could be measured; more would.
constexpr unsigned kMaxSpillBytes = 16;

}  // namespace

TEST_SUITE("compile") {
  TEST_CASE("every tile of every architecture compiles, within its registers, spills and shared memory") {
    std::vector<Specialization> specs;
    for (const unsigned sm : architectures()) {
      for (const WeightLayout layout : {WeightLayout::k8n, WeightLayout::nk8, WeightLayout::prepacked}) {
        for (const bool aligned : {true, false}) {
          const QkvProblem problem{.n_q = 1024, .n_k = 256, .n_v = 384, .k = 1024, .layout = layout};
          const auto candidates = candidate_specializations(problem, typical_device(sm), {.sm = sm}, aligned);
          specs.insert(specs.end(), candidates.begin(), candidates.end());
        }
      }
    }
    REQUIRE(architectures().size() >= 8);
    std::atomic<std::size_t> next{0};
    std::mutex mutex;
    unsigned most_spilled = 0;
    double milliseconds = 0;
    const auto work = [&] {
      for (std::size_t i = next++; i < specs.size(); i = next++) {
        const Specialization& spec = specs[i];
        try {
          const CompiledKernel kernel = compile_kernel(nvrtc(), spec);
          const unsigned threads = threads_per_block(spec.tile);
          const std::lock_guard lock(mutex);
          CAPTURE(describe(spec));
          CHECK(kernel.registers > 0);
          CHECK(kernel.registers <= 255);
          // What the launch bounds promise: that many blocks fit the register file of 65536.
          CHECK(kernel.registers * threads * spec.tile.min_blocks <= 65536);
          CHECK(kernel.spill_bytes <= kMaxSpillBytes);
          CHECK(kernel.static_smem_bytes == 0);
          CHECK(kernel.log.find("C75") == std::string::npos);  // ptxas serialised a wgmma
          CHECK(smem_bytes(spec) <= typical_device(spec.target.sm).smem_per_block_bytes);
          CHECK(kernel.ptx.find(".entry " + kernel.lowered_name) != std::string::npos);
          CHECK(kernel.ptx.find(fmt::format(".target {}", to_string(spec.target))) != std::string::npos);
          REQUIRE(kernel.cubin.size() > 64);
          CHECK(std::string(kernel.cubin.begin() + 1, kernel.cubin.begin() + 4) == "ELF");
          most_spilled = std::max(most_spilled, kernel.spill_bytes);
          milliseconds += kernel.compile_ms;
        } catch (const std::exception& error) {
          const std::lock_guard lock(mutex);
          FAIL_CHECK(std::string(error.what()).substr(0, 2000));
        }
      }
    };
    {
      const std::jthread second(work);
      work();
    }
    std::cout << fmt::format(
        "NVRTC {}.{}: {} kernels for {} architectures in {:.0f} s of compiling, at most {} bytes spilled\n",
        nvrtc().major, nvrtc().minor, specs.size(), architectures().size(), milliseconds / 1000, most_spilled);
  }

  TEST_CASE("no option carries a path, and the text of the options is canonical") {
    for (const std::string& option : compile_options(nvrtc(), small_spec())) {
      CHECK(option.find('/') == std::string::npos);
      CHECK_FALSE(option.starts_with("-I"));
    }
    CHECK(compile_options(nvrtc(), small_spec()) == compile_options(nvrtc(), small_spec()));
  }

  TEST_CASE("the same specialisation gives the same PTX and symbol, run after run") {
    const CompiledKernel a = compile_kernel(nvrtc(), small_spec());
    const CompiledKernel b = compile_kernel(nvrtc(), small_spec());
    CHECK(a.ptx == b.ptx);
    CHECK(a.lowered_name == b.lowered_name);
    CHECK(a.nvrtc_version == fmt::format("{}.{}", nvrtc().major, nvrtc().minor));
  }

  TEST_CASE("each field of the specialisation changes the expression, the description and the hash") {
    const Specialization base = small_spec();
    std::vector<Specialization> changed;
    const auto change = [&](auto&& edit) {
      Specialization spec = base;
      edit(spec);
      changed.push_back(spec);
    };
    change([](auto& s) { s.pipeline = Pipeline::simple; });
    change([](auto& s) { s.layout = WeightLayout::nk8; });
    change([](auto& s) { s.activation_dtype = DType::bf16; });
    change([](auto& s) { s.scale_dtype = DType::f32; });
    change([](auto& s) { s.n_q += 8; });
    change([](auto& s) { s.n_k += 8; });
    change([](auto& s) { s.n_v += 8; });
    change([](auto& s) { s.k += 128; });
    change([](auto& s) { s.group_size = 64; });
    change([](auto& s) { s.aligned = !s.aligned; });
    change([](auto& s) { s.tile.block_m += 8; });
    change([](auto& s) { s.tile.block_n += 32; });
    change([](auto& s) { s.tile.warps_m += 1; });
    change([](auto& s) { s.tile.warps_n += 1; });
    change([](auto& s) { s.tile.warps_k += 1; });
    change([](auto& s) { s.tile.stages += 1; });
    change([](auto& s) { s.tile.min_blocks += 1; });
    change([](auto& s) { s.tile.block_k = 64; });
    change([](auto& s) { s.tile.copy_warps += 1; });
    change([](auto& s) { s.tile.cluster_k += 1; });
    change([](auto& s) { s.tile.cluster_n += 1; });
    change([](auto& s) { s.target.sm = 90; });
    change([](auto& s) { s.target.suffix = 'a'; });
    std::size_t fields = 0;
    for_each_field(base, [&](std::string_view, auto) { ++fields; });
    CHECK(changed.size() == fields);
    std::set<std::string> expressions{name_expression(base)}, texts{describe(base)};
    std::set<std::size_t> hashes{SpecializationHash{}(base)};
    for (const Specialization& spec : changed) {
      CHECK(expressions.insert(name_expression(spec)).second);
      CHECK(texts.insert(describe(spec)).second);
      CHECK(hashes.insert(SpecializationHash{}(spec)).second);
      CHECK_FALSE(spec == base);
    }
    CHECK(name_expression(base).starts_with(
        "qkvjit::qkv_decode<qkvjit::Specialization{.pipeline = qkvjit::Pipeline::decode, "));
    CHECK(name_expression(base).ends_with(".target = qkvjit::Target{.sm = 80u, .suffix = static_cast<char>(0)}}>"));
  }

  TEST_CASE("a kernel that does not compile: options, version, log and numbered source are in the text") {
    Specialization spec = small_spec();
    spec.tile.warps_m = 3;  // the kernel's static_assert refuses it
    try {
      compile_kernel(nvrtc(), spec);
      FAIL("compiled");
    } catch (const CompileError& error) {
      const std::string text = error.what();
      for (const char* part : {"nvrtcCompileProgram", "qkv_decode.cu", "--gpu-architecture=sm_80",
                               "static assertion failed", "log:", "tile.warps_m=3", "    1 | // SPDX"}) {
        CHECK_MESSAGE(text.find(part) != std::string::npos, part);
      }
      CHECK(text.find(fmt::format("NVRTC {}.{}", nvrtc().major, nvrtc().minor)) != std::string::npos);
    }
    spec = small_spec();
    spec.target.sm = 79;
    CHECK_THROWS_WITH_AS(compile_kernel(nvrtc(), spec), doctest::Contains("sm_79"), CompileError);
  }

  TEST_CASE("resource lines of ptxas") {
    const ResourceUsage usage = parse_resource_usage(
        "ptxas info    : 0 bytes gmem\nptxas info    : Compiling entry function 'f' for 'sm_90'\nptxas info    : "
        "Function properties for f\n"
        "    24 bytes stack frame, 20 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers, 24 bytes cumulative stack size, 96 bytes smem\n");
    CHECK(usage.registers == 168);
    CHECK(usage.spill_bytes == 32);
    CHECK(usage.static_smem_bytes == 96);
    CHECK_THROWS_WITH_AS(parse_resource_usage("nothing of the kind"), doctest::Contains("nothing of the kind"),
                         CompileError);
  }

  TEST_CASE("the flattened source is self-contained, and nvcc compiles it where there is one") {
    const Specialization spec = small_spec();
    const std::string source = flattened_source(spec);
    CHECK(source.find("#include") == std::string::npos);
    for (const char* once : {"struct Specialization {", "struct QkvParams {", "qkv_decode(const __grid_constant__"}) {
      const std::size_t first = source.find(once);
      REQUIRE(first != std::string::npos);
      CHECK(source.find(once, first + 1) == std::string::npos);
    }
    if (std::system("nvcc --version > /dev/null 2>&1") != 0) {
      std::cout << "SKIPPED: nvcc is not on PATH, its command line is not tried\n";
      return;
    }
    const std::string base =
        fmt::format("{}/qkvjit_flat_{}", std::getenv("TMPDIR") ? std::getenv("TMPDIR") : "/tmp", getpid());
    std::ofstream(base + ".cu") << source;
    CHECK(std::system((nvcc_command(spec, base + ".cu", base + ".cubin") + " > " + base + ".log 2>&1").c_str()) == 0);
    CHECK(std::ifstream(base + ".cubin").good());
    for (const char* suffix : {".cu", ".cubin", ".log"}) std::remove((base + suffix).c_str());
  }
}
