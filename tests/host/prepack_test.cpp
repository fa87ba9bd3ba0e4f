// SPDX-License-Identifier: Apache-2.0
// Prepacking without a GPU: sizes and views, every refusal before anything is launched, what is launched, and that both
// kernels compile without spilling. That their words are right is for the GPU suite "dependent".
#include "qkvjit/prepack.h"

#include <doctest/doctest.h>

#include <optional>

#include "compile/compiler.h"
#include "cuda/nvrtc.h"
#include "qkvjit/qkvjit.h"
#include "support/fake_driver.h"
#include "support/fake_nvrtc.h"
#include "support/messages.h"
#include "support/packed_reference.h"

using namespace qkvjit;

namespace {

constexpr QkvProblem kProblem{.n_q = 128, .n_k = 72, .n_v = 1, .k = 256};

struct Bench {
  Bench() {
    fake::reset({fake::Gpu{}});
    fake::reset_nvrtc();
    context.emplace(0, fake::table());
    cache.emplace(CacheOptions{}, fake::nvrtc());
    stream = fake::make_stream(context->handle());
    buffer = fake::make_memory(0, 1u << 20);
  }
  std::optional<DeviceContext> context;
  std::optional<KernelCache> cache;
  CUstream stream = nullptr;
  void* buffer = nullptr;
};

/// Weights at addresses of their own; nothing reads them.
QkvTensors weights_of(const QkvProblem& p, std::uintptr_t base = 0x100000) {
  QkvTensors t;
  const auto view = [&](std::uintptr_t address, std::uint64_t n) {
    const auto k8 = static_cast<std::int64_t>(p.k / 8), columns = static_cast<std::int64_t>(n);
    const void* data = reinterpret_cast<const void*>(address);
    return p.layout == WeightLayout::nk8 ? TensorView::matrix(data, DType::u32, columns, k8)
                                         : TensorView::matrix(data, DType::u32, k8, columns);
  };
  t.w_q_packed = view(base, p.n_q);
  t.w_k_packed = view(base + 0x100000, p.n_k);
  t.w_v_packed = view(base + 0x200000, p.n_v);
  return t;
}

template <typename Call>
std::string refusal(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    CHECK(fake::launches().empty());
    return error.what();
  }
  return "(not refused)";
}

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_SUITE("prepack") {
  TEST_CASE("sizes: blocks of 64 x 64, each matrix padded") {
    CHECK(packed_bytes(kProblem) == 4 * (2 + 2 + 1) * 2048);
    CHECK(packed_bytes({.n_q = 64, .n_k = 64, .n_v = 64, .k = 128}) == 128 / 2 * 3 * 64);  // nothing to pad
    CHECK_THROWS_AS(packed_bytes({.n_q = 64, .n_k = 64, .n_v = 64, .k = 100}), InvalidProblem);
    CHECK(prepack_scratch_bytes({.n_q = 64, .n_k = 192, .n_v = 64, .k = 128}) == 192 * 32);
  }

  TEST_CASE("the reference is a permutation: every weight once, and zeros") {
    // Distinct nibbles cannot be had for more than 16 weights: mark one at a time.
    for (const auto& [row, column] : {std::pair<std::uint64_t, std::uint64_t>{0, 0}, {63, 63}, {64, 0}, {127, 71}}) {
      const auto words = qkvtest::packed_reference(
          128, 72, [&, r = row, c = column](std::uint64_t k, std::uint64_t n) { return k == r && n == c ? 15u : 0u; });
      unsigned set = 0;
      for (const std::uint32_t word : words) {
        for (unsigned nibble = 0; nibble < 8; ++nibble) set += (word >> (4 * nibble) & 15u) == 15u ? 1 : 0;
      }
      CHECK(words.size() == 2 * 2 * 512);
      CHECK(set == 1);
    }
  }

  TEST_CASE("prepack launches once, with a thread block for each block, and describes what it made") {
    for (const WeightLayout layout : {WeightLayout::k8n, WeightLayout::nk8}) {
      Bench bench;
      QkvProblem problem = kProblem;
      problem.layout = layout;
      const QkvTensors tensors = weights_of(problem);
      const PackedWeights packed =
          prepack(*bench.cache, *bench.context, problem, tensors, bench.buffer, packed_bytes(problem), bench.stream);
      REQUIRE(fake::launches().size() == 1);
      const fake::Launch launch = fake::launches()[0];
      CHECK(launch.grid[0] == 4 * 5);
      CHECK(launch.block[0] == 128);
      CHECK(launch.smem_bytes == 2048);
      CHECK(launch.attributes == 0);
      CHECK(launch.params.weights[1] == tensors.w_k_packed.data);
      CHECK(launch.params.outputs[0] == bench.buffer);
      CHECK(launch.params.outputs[2] == static_cast<char*>(bench.buffer) + 4 * 4 * 2048);
      CHECK(packed.version == kPackedVersion);
      CHECK(packed.problem.layout == WeightLayout::prepacked);
      CHECK(packed.source == layout);
      CHECK(packed.bytes[2] == 4 * 2048);
      const TensorView view = packed.view(1);
      CHECK(view.shape[0] == 4);
      CHECK(view.shape[1] == 1024);
      CHECK(view.data == launch.params.outputs[1]);

      fake::clear_log();
      unpack(*bench.cache, *bench.context, packed, tensors, layout, bench.stream);
      REQUIRE(fake::launches().size() == 1);
      CHECK(fake::launches()[0].params.weights[0] == bench.buffer);
      CHECK(fake::launches()[0].params.outputs[2] == tensors.w_v_packed.data);
    }
  }

  TEST_CASE("a plan takes packed weights, and refuses those of another problem, version or device") {
    Bench bench;
    const QkvTensors raw = weights_of(kProblem);
    const PackedWeights packed =
        prepack(*bench.cache, *bench.context, kProblem, raw, bench.buffer, packed_bytes(kProblem), bench.stream);
    QkvProblem problem = kProblem;
    problem.layout = WeightLayout::prepacked;
    CHECK(with_packed_weights(problem, raw, packed, 0).w_q_packed.data == bench.buffer);
    fake::clear_log();
    PackedWeights other = packed;
    other.version = 7;
    CHECK(has(refusal([&] { with_packed_weights(problem, raw, other, 0); }), "version: got 7, needs 1"));
    QkvProblem wide = problem;
    wide.n_k = 80;
    CHECK(has(refusal([&] { with_packed_weights(wide, raw, packed, 0); }), "got N = 128/72/1"));
    CHECK_THROWS_AS(with_packed_weights(problem, raw, packed, 1), DeviceMismatch);
  }

  TEST_CASE("refusals: layout, shapes, memory; nothing is launched") {
    Bench bench;
    const auto pack = [&](const QkvProblem& problem, const QkvTensors& tensors, void* buffer, std::size_t bytes) {
      return refusal([&] { prepack(*bench.cache, *bench.context, problem, tensors, buffer, bytes, bench.stream); });
    };
    const QkvTensors good = weights_of(kProblem);
    const std::size_t bytes = packed_bytes(kProblem);
    QkvProblem packed = kProblem;
    packed.layout = WeightLayout::prepacked;
    CHECK(has(pack(packed, good, bench.buffer, bytes), "prepack: layout: got prepacked, needs k8n or nk8"));
    CHECK(has(pack(kProblem, good, nullptr, bytes), "buffer: got"));
    CHECK(has(pack(kProblem, good, bench.buffer, bytes - 1), "needs 40960 bytes"));
    CHECK(has(pack(kProblem, good, static_cast<char*>(bench.buffer) + 8, bytes), "multiple of 16"));
    QkvTensors inside = good;
    inside.w_k_packed.data = static_cast<char*>(bench.buffer) + 4096;
    CHECK(has(pack(kProblem, inside, bench.buffer, bytes), "overlap those of w_k_packed"));
    alignas(16) static char host_memory[1 << 16];
    CHECK(has(pack(kProblem, good, host_memory, bytes), "buffer: got host memory"));
    CHECK(has(pack(kProblem, good, fake::make_memory(0, 1u << 20, fake::Memory::managed), bytes), "managed"));
    CHECK(has(pack(kProblem, good, fake::make_memory(0, 1u << 20, fake::Memory::device, fake::make_context(0)), bytes),
              "another context"));
    QkvTensors wrong = good;
    wrong.w_v_packed.shape[0] = 31;
    CHECK(has(pack(kProblem, wrong, bench.buffer, bytes), "prepack: w_v_packed: got the shape [31, 1]"));
    wrong = good;
    wrong.w_q_packed.dtype = DType::f16;
    CHECK(has(pack(kProblem, wrong, bench.buffer, bytes), "w_q_packed: got dtype f16, needs u32"));
    wrong = good;
    wrong.w_k_packed.device.ordinal = 1;
    CHECK(has(pack(kProblem, wrong, bench.buffer, bytes), "CUDA device 1"));
    wrong = good;
    wrong.w_k_packed.data = nullptr;
    CHECK(has(pack(kProblem, wrong, bench.buffer, bytes), "null pointer"));
  }

  TEST_CASE("in place: a copy and a launch for each slab and matrix, in that order; else refused before any") {
    Bench bench;
    const QkvProblem problem{.n_q = 128, .n_k = 64, .n_v = 64, .k = 256};
    const QkvTensors tensors = weights_of(problem);
    const PackedWeights packed = prepack_in_place(*bench.cache, *bench.context, problem, tensors, bench.buffer,
                                                  prepack_scratch_bytes(problem), bench.stream);
    CHECK(fake::launches().size() == 4 * 3);
    CHECK(fake::calls("cuMemcpyDtoDAsync") == 4 * 3);
    CHECK(fake::launches()[0].grid[0] == 2);
    CHECK(fake::launches()[3].params.weights[0] == bench.buffer);
    CHECK(fake::launches()[3].params.outputs[0] == static_cast<char*>(tensors.w_q_packed.data) + 128 * 32);
    CHECK(packed.data[1] == tensors.w_k_packed.data);

    fake::clear_log();
    const auto in_place = [&](const QkvProblem& p, const QkvTensors& t) {
      return refusal(
          [&] { prepack_in_place(*bench.cache, *bench.context, p, t, bench.buffer, 1u << 20, bench.stream); });
    };
    CHECK(has(in_place(kProblem, weights_of(kProblem)), "w_k_packed: got N = 72, needs a multiple of 64"));
    QkvProblem nk8 = problem;
    nk8.layout = WeightLayout::nk8;
    CHECK(has(in_place(nk8, weights_of(nk8)), "layout: got nk8, needs k8n"));
    CHECK(has(in_place(problem, weights_of(problem, 0x100004)), "multiple of 16"));
    CHECK(has(refusal([&] {
                prepack_in_place(*bench.cache, *bench.context, problem, tensors, bench.buffer, 128, bench.stream);
              }),
              "scratch: got 128 bytes"));
  }

  TEST_CASE("while the stream captures a kernel that is not loaded is refused, a loaded one is launched") {
    Bench bench;
    const QkvTensors tensors = weights_of(kProblem);
    const auto pack = [&] {
      prepack(*bench.cache, *bench.context, kProblem, tensors, bench.buffer, packed_bytes(kProblem), bench.stream);
    };
    fake::begin_capture(bench.stream);
    CHECK_THROWS_AS(pack(), CaptureWouldLoad);
    fake::end_capture(bench.stream);
    pack();
    fake::begin_capture(bench.stream);
    CHECK_NOTHROW(pack());
    fake::end_capture(bench.stream);
  }

  TEST_CASE("both kernels compile for old and new architectures, without spills") {
    const auto nvrtc = open_nvrtc();
    for (const Pipeline pipeline : {Pipeline::prepack, Pipeline::unpack}) {
      for (const WeightLayout layout : {WeightLayout::k8n, WeightLayout::nk8}) {
        for (const unsigned sm : {80u, 90u, 120u}) {
          Specialization spec{.pipeline = pipeline, .layout = layout, .n_q = 1000, .n_k = 17, .n_v = 1, .k = 384};
          spec.tile = {.block_m = 1, .block_n = kPackedN, .warps_n = 4, .block_k = kPackedK};
          spec.target.sm = sm;
          const CompiledKernel kernel = compile_kernel(*nvrtc, spec);
          CHECK(kernel.spill_bytes == 0);
          CHECK(kernel.static_smem_bytes == 0);
        }
      }
    }
  }
}
