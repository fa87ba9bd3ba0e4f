// SPDX-License-Identifier: Apache-2.0
// Right numbers: every tile of every pipeline that the GPU can run, in both layouts, against the reference. The lists
// of M, N and K are covered in pairs, not multiplied. Cases with an exact answer are compared bit for bit.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "gpu/gpu_fixture.h"
#include "qkvjit/select.h"

namespace {

using namespace qkvtest;
using qkvjit::Kernel;
using qkvjit::QkvPlan;

constexpr std::array<std::uint64_t, 11> kNs{1, 2, 7, 8, 24, 40, 96, 127, 384, 1000, 4096};
constexpr std::array<std::uint64_t, 5> kKs{128, 256, 384, 4096, 11008};

std::vector<std::uint64_t> small_ms() {
  std::vector<std::uint64_t> ms;
  for (std::uint64_t m = 1; m <= 33; ++m) ms.push_back(m);
  for (const std::uint64_t m : {64, 65, 127, 128, 129}) ms.push_back(m);
  return ms;
}

/// Rows to compute: the last of each M, both sides of tile edges, and spread ones up to the budget of products.
std::vector<std::uint64_t> rows_for(const HostCase& host, const std::vector<std::uint64_t>& ms, double products) {
  const std::uint64_t m = host.m;
  const double a_row = static_cast<double>(host.n[0] + host.n[1] + host.n[2]) * static_cast<double>(host.k);
  const auto affordable = static_cast<std::uint64_t>(std::max(12.0, products / a_row));
  if (affordable >= m) return {};  // all
  std::set<std::uint64_t> rows{0, m - 1};
  for (const std::uint64_t last : ms) rows.insert(last - 1);
  for (std::uint64_t i = 0; rows.size() < affordable; ++i) rows.insert((i * 2654435761u + 7) % m);
  return {rows.begin(), rows.end()};
}

void run_kernels(const std::vector<std::shared_ptr<const Kernel>>& kernels, DeviceCase& device, Expected& expected,
                 const std::vector<std::uint64_t>& ms, bool statistics = true) {
  for (const auto& kernel : kernels) {
    const std::uint64_t block_m = kernel->spec().tile.block_m;
    for (const std::uint64_t m : ms) {
      // Every M up to two tiles of tokens; beyond, one in 32 and the largest show whatever more tiles can.
      if (m > 2 * block_m + 1 && m % 32 != 1 && m != ms.back()) continue;
      if (m > 160 * block_m) continue;  // weights would be read over and over
      CAPTURE(device.host().name());
      CAPTURE(m);
      CAPTURE(describe(kernel->spec()));
      device.poison();
      // Every other M as a dependent launch, where the kernel can be one.
      launch_kernel(*kernel, gpu().context, device.tensors(m), gpu().stream, m % 2 == 1);
      expected.check(device.outputs(gpu().stream, m), m, kernel->spec(), statistics);
    }
  }
  device.check_inputs();
}

/// All candidates, or every `share`-th of them from `first` on, and the plan's own choice of row.
void run_case(const HostCase& host, const std::vector<std::uint64_t>& ms, double products = 1.5e9,
              std::size_t share = 1, std::size_t first = 0) {
  DeviceCase device(host);
  Expected expected(host, rows_for(host, ms, products));
  run_kernels(gpu().candidates(host.problem(), true, share, first % share), device, expected, ms);
  const QkvPlan plan(gpu().cache, gpu().context, host.problem(), {.binding = qkvjit::Binding::lazy});
  for (const std::uint64_t m : ms) {
    CAPTURE(host.name());
    CAPTURE(m);
    device.poison();
    plan(device.tensors(m), gpu().stream);
    expected.check(device.outputs(gpu().stream, m), m, plan.row(m));
  }
}

/// Runs every candidate, aligned or not, and gives its outputs to `check`.
void for_each_candidate(const HostCase& host, const std::function<void(const Outputs&, const Specialization&)>& check) {
  DeviceCase device(host);
  for (const bool aligned : {true, false}) {
    for (const auto& kernel : gpu().candidates(host.problem(), aligned)) {
      if (aligned && !kernel->spec().aligned) continue;  // the same list as for false
      CAPTURE(host.name());
      CAPTURE(describe(kernel->spec()));
      device.poison();
      launch_kernel(*kernel, gpu().context, device.tensors(), gpu().stream);
      check(device.outputs(gpu().stream, host.m), kernel->spec());
    }
  }
  device.check_inputs();
}

void check_bits(const Outputs& got, const Outputs& want, const HostCase& host) {
  for (std::size_t matrix = 0; matrix < 3; ++matrix) {
    REQUIRE(got[matrix].size() == want[matrix].size());
    const auto [a, b] = std::mismatch(got[matrix].begin(), got[matrix].end(), want[matrix].begin());
    if (a == got[matrix].end()) continue;
    const auto at = static_cast<std::uint64_t>(a - got[matrix].begin());
    std::size_t different = 0;
    for (std::size_t i = 0; i < got[matrix].size(); ++i) different += got[matrix][i] != want[matrix][i] ? 1 : 0;
    FAIL_CHECK(fmt::format("{}[{}, {}] is {} (0x{:04x}), needs {} (0x{:04x}) exactly; {} of {} elements differ",
                           kMatrixNames[matrix], at / host.n[matrix], at % host.n[matrix], value_of(*a), *a,
                           value_of(*b), *b, different, got[matrix].size()));
  }
}

/// Each layout with each of the widths: one that is no multiple of 8 keeps the kernels for aligned operands out.
std::vector<std::pair<WeightLayout, std::uint64_t>> with_each_layout(std::initializer_list<std::uint64_t> widths) {
  std::vector<std::pair<WeightLayout, std::uint64_t>> cases;
  for (const WeightLayout layout : kLayouts) {
    for (const std::uint64_t width : widths) cases.emplace_back(layout, width);
  }
  return cases;
}

Outputs sized_outputs(const HostCase& host) {
  Outputs outputs;
  for (std::size_t i = 0; i < 3; ++i) outputs[i].resize(host.m * host.n[i]);
  return outputs;
}

}  // namespace

TEST_SUITE("projection") {
  TEST_CASE("every tile, layout, N and K of the lists, for M = 1 to 33, 64, 65, 127, 128, 129") {
    std::set<std::uint64_t> seen_m;
    std::vector<std::pair<std::uint64_t, std::uint64_t>> shapes{{4096, 4096}, {4096, 11008}};
    for (std::size_t i = 0; i < kNs.size(); ++i) {
      shapes.emplace_back(kNs[i], kKs[i % kKs.size()]);
      shapes.emplace_back(kNs[i], kKs[(i + 2) % kKs.size()]);
    }
    // Compiling takes most of the time: each tile has its turn at every third shape of a layout, eight in all.
    constexpr std::size_t kShare = 3;
    std::uint64_t seed = 1000;
    for (std::size_t shape = 0; shape < shapes.size(); ++shape) {
      const auto& [n, k] = shapes[shape];
      for (const WeightLayout layout : kLayouts) {
        ++seed;
        std::vector<std::uint64_t> ms = small_ms();
        if (n * k > 400'000) {
          ms = {1, 2 + seed % 7, 8, 9 + seed % 7, 16, 17 + seed % 16, 33, 64 + seed % 2, 127 + seed % 3};
        }
        seen_m.insert(ms.begin(), ms.end());
        run_case(HostCase::random(ms.back(), {n, n, n}, k, layout, seed), ms, 1.5e9, kShare, shape);
      }
    }
    CHECK(seen_m.size() == small_ms().size());
  }

  TEST_CASE("M = 1000 and 4099") {
    std::uint64_t seed = 2000;
    for (const auto& [n, k] :
         {std::pair<std::uint64_t, std::uint64_t>{1000, 256}, {24, 384}, {127, 128}, {384, 4096}}) {
      for (const WeightLayout layout : kLayouts) {
        run_case(HostCase::random(4099, {n, n, n}, k, layout, ++seed), {1000, 4099}, 4e8);
      }
    }
  }

  TEST_CASE("N_q, N_k and N_v differ: GQA, MQA, shards of 8, and odd widths") {
    std::uint64_t seed = 3000;
    const std::array<std::uint64_t, 3> widths[] = {{96, 8, 24}, {4096, 512, 512}, {640, 128, 256},
                                                   {7, 1, 130}, {1, 333, 2},      {8, 8, 264}};
    for (const auto& n : widths) {
      for (const WeightLayout layout : kLayouts) {
        run_case(HostCase::random(129, n, 384, layout, ++seed), {1, 8, 15, 16, 31, 33, 64, 129});
      }
    }
  }

  TEST_CASE("bases off their 16 bytes: odd element offsets, alone and all at once") {
    std::mt19937_64 random(4000);
    for (const WeightLayout layout : kLayouts) {
      for (int round = 0; round < 8; ++round) {
        const std::uint64_t n = round % 2 == 0 ? 96 : 127;
        const HostCase host = HostCase::random(65, {n, n, n}, 256, layout, random());
        std::array<std::size_t, 10> offsets{};
        for (std::size_t i = 0; i < offsets.size(); ++i) {
          if (round < 4 || static_cast<int>(i) == round + 2) offsets[i] = 1 + 2 * (random() % 4) % 8;
        }
        DeviceCase device(host, offsets);
        Expected expected(host);
        run_kernels(gpu().candidates(host.problem(), false), device, expected, {1, 7, 16, 33, 65});
        const QkvPlan plan(gpu().cache, gpu().context, host.problem(), {.binding = qkvjit::Binding::lazy});
        for (const std::uint64_t m : {1, 16, 65}) {
          device.poison();
          plan(device.tensors(m), gpu().stream);
          CHECK_FALSE(plan.row(m, false).aligned);
          expected.check(device.outputs(gpu().stream, m), m, plan.row(m, false));
        }
        // A kernel of aligned copies must not be given these.
        if (n % 8 != 0) continue;
        const auto aligned = gpu().candidates(host.problem(), true);
        CHECK_THROWS_AS(launch_kernel(*aligned.front(), gpu().context, device.tensors(), gpu().stream),
                        qkvjit::InvalidProblem);
      }
    }
  }

  TEST_CASE("small integers and powers of two: bit-equal, whatever the order of the sum") {
    std::uint64_t seed = 5000;
    for (const WeightLayout layout : kLayouts) {
      for (const auto& n : {std::array<std::uint64_t, 3>{40, 40, 40}, {127, 9, 64}}) {
        HostCase host = HostCase::random(37, n, 512, layout, ++seed);
        std::mt19937_64 random(seed);
        for (auto& x : host.x) x = f16(static_cast<int>(random() % 9) - 4);
        for (auto& scales : host.scales) {
          // |sum| <= 512 * 4 * 8 * 4 = 2^16 in steps of 1/8: exact in f32, rounded once to f16.
          for (auto& s : scales)
            s = f16(std::ldexp(random() % 2 == 0 ? 1.0F : -1.0F, static_cast<int>(random() % 6) - 3));
        }
        Outputs want = sized_outputs(host);
        for (std::size_t matrix = 0; matrix < 3; ++matrix) {
          std::vector<double> w(host.k * n[matrix]);
          for (std::uint64_t i = 0; i < w.size(); ++i) {
            const std::uint64_t k = i / n[matrix], column = i % n[matrix];
            w[i] = host.weight(static_cast<int>(matrix), k, column) *
                   value_of(host.scales[matrix][k / 128 * n[matrix] + column]);
          }
          for (std::uint64_t row = 0; row < host.m; ++row) {
            for (std::uint64_t column = 0; column < n[matrix]; ++column) {
              double sum = 0;
              for (std::uint64_t k = 0; k < host.k; ++k) {
                sum += value_of(host.x[row * host.k + k]) * w[k * n[matrix] + column];
              }
              want[matrix][row * n[matrix] + column] = f16(sum);
            }
          }
        }
        for_each_candidate(host, [&](const Outputs& got, const Specialization&) { check_bits(got, want, host); });
      }
    }
  }

  TEST_CASE("ties and the overflow edge: 2049, 2051, 65519, 65520") {
    struct Sum {
      float a, b;
      std::uint16_t bits;
    };
    // a + b, and the f16 that ties-to-even gives.
    const Sum sums[] = {{2048, 1, 0x6800},     {2048, 3, 0x6802},       {4096, 2, 0x6c00},   {4096, 6, 0x6c02},
                        {1, 0x1p-11F, 0x3c00}, {1, 0x1.8p-10F, 0x3c02}, {65504, 15, 0x7bff}, {65504, 16, 0x7c00}};
    for (const WeightLayout layout : kLayouts) {
      HostCase host = HostCase::zeros(2 * std::size(sums), {40, 33, 16}, 384, layout);
      Outputs want = sized_outputs(host);
      for (int matrix = 0; matrix < 3; ++matrix) {
        for (std::uint64_t column = 0; column < host.n[static_cast<std::size_t>(matrix)]; ++column) {
          // Both terms of the sum in each slab, at two places of their own for each half of the columns.
          host.set(matrix, column % 2 == 0 ? 0 : 255, column, 1);
          host.set(matrix, column % 2 == 0 ? 383 : 130, column, 1);
        }
      }
      for (std::uint64_t row = 0; row < host.m; ++row) {
        const Sum& sum = sums[row / 2];
        const float sign = row % 2 == 0 ? 1.0F : -1.0F;
        host.x[row * host.k + 0] = host.x[row * host.k + 255] = f16(sign * sum.a);
        host.x[row * host.k + 383] = host.x[row * host.k + 130] = f16(sign * sum.b);
        for (std::size_t matrix = 0; matrix < 3; ++matrix) {
          std::fill_n(want[matrix].begin() + static_cast<std::ptrdiff_t>(row * host.n[matrix]), host.n[matrix],
                      static_cast<std::uint16_t>(sum.bits | (row % 2 == 0 ? 0 : 0x8000)));
        }
      }
      for_each_candidate(host, [&](const Outputs& got, const Specialization&) { check_bits(got, want, host); });
    }
  }

  TEST_CASE("all 16 nibble values in all 8 positions of a word, one at a time") {
    for (const WeightLayout layout : kLayouts) {
      // x is the unit matrix: row r of the output is row k = r of the weights.
      HostCase host = HostCase::zeros(256, {16, 40, 17}, 256, layout);
      Outputs want = sized_outputs(host);
      for (std::uint64_t k = 0; k < host.k; ++k) host.x[k * host.k + k] = f16(1);
      for (int matrix = 0; matrix < 3; ++matrix) {
        const auto i = static_cast<std::size_t>(matrix);
        for (std::uint64_t column = 0; column < host.n[i]; ++column) {
          const float scale = std::ldexp(1.0F, static_cast<int>(column % 5) - 2 + matrix);
          for (std::uint64_t group = 0; group < 2; ++group) {
            host.scales[i][group * host.n[i] + column] = f16(group == 0 ? scale : -scale);
          }
          for (std::uint64_t k = 0; k < host.k; ++k) {
            const int value = static_cast<int>((k / 8 + 3 * (k % 8) + column) % 16) - 8;
            host.set(matrix, k, column, value);
            want[i][k * host.n[i] + column] = f16(static_cast<float>(value) * (k < 128 ? scale : -scale));
          }
        }
      }
      // 0 * -s is -0 in a single product, but a sum that holds +0 is +0.
      for (auto& matrix : want) std::replace(matrix.begin(), matrix.end(), std::uint16_t{0x8000}, std::uint16_t{0});
      for_each_candidate(host, [&](const Outputs& got, const Specialization&) {
        Outputs plain = got;
        for (auto& matrix : plain) std::replace(matrix.begin(), matrix.end(), std::uint16_t{0x8000}, std::uint16_t{0});
        check_bits(plain, want, host);
      });
    }
  }

  TEST_CASE("the canaries of KAIO's end-to-end test: -8 is -1024, and Q, K, V are 1, 2, 3") {
    for (const WeightLayout layout : kLayouts) {
      for (const std::uint64_t m : {1, 16, 64}) {
        HostCase host = HostCase::zeros(m, {64, 64, 64}, 128, layout);
        std::fill(host.x.begin(), host.x.end(), f16(1));
        for (auto& words : host.words) std::fill(words.begin(), words.end(), 0x88888888u);
        Outputs want = sized_outputs(host);
        for (auto& matrix : want) std::fill(matrix.begin(), matrix.end(), f16(-1024));
        for_each_candidate(host, [&](const Outputs& got, const Specialization&) { check_bits(got, want, host); });

        for (std::size_t matrix = 0; matrix < 3; ++matrix) {
          std::fill(host.words[matrix].begin(), host.words[matrix].end(), 0x11111111u);
          const float value = static_cast<float>(matrix + 1);
          std::fill(host.scales[matrix].begin(), host.scales[matrix].end(), f16(value / 128));
          std::fill(want[matrix].begin(), want[matrix].end(), f16(value));
        }
        for_each_candidate(host, [&](const Outputs& got, const Specialization&) { check_bits(got, want, host); });
      }
    }
  }

  TEST_CASE("x of +-6e4 where q = 0 does not disturb the sum") {
    std::uint64_t seed = 6000;
    for (const auto& [layout, width] : with_each_layout({127, 24})) {
      HostCase host = HostCase::random(33, {40, width, 8}, 384, layout, ++seed);
      for (std::uint64_t k = 3; k < host.k; k += 29) {
        for (std::uint64_t row = 0; row < host.m; ++row) host.x[row * host.k + k] = f16(row % 2 == 0 ? 6e4F : -6e4F);
        for (int matrix = 0; matrix < 3; ++matrix) {
          for (std::uint64_t n = 0; n < host.n[static_cast<std::size_t>(matrix)]; ++n) host.set(matrix, k, n, 0);
        }
      }
      Expected expected(host);
      for_each_candidate(
          host, [&](const Outputs& got, const Specialization& spec) { expected.check(got, host.m, spec, false); });
    }
  }

  TEST_CASE("special scales: negative, zero, subnormal, largest, inf and NaN stay in their columns") {
    const std::uint16_t specials[] = {f16(-0.03F), 0x0000, 0x8000, 0x0001, 0x83ff,
                                      0x0400,      0x7bff, 0x7c00, 0xfc00, 0x7e00};
    std::uint64_t seed = 7000;
    for (const auto& [layout, width] : with_each_layout({57, 56})) {
      HostCase host = HostCase::random(19, {40, width, 24}, 384, layout, ++seed);
      for (std::size_t matrix = 0; matrix < 3; ++matrix) {
        for (std::uint64_t n = 0; n < host.n[matrix]; n += 2) {  // every other column stays ordinary
          host.scales[matrix][n / 2 % 3 * host.n[matrix] + n] = specials[n / 2 % std::size(specials)];
        }
      }
      Expected expected(host);
      for_each_candidate(
          host, [&](const Outputs& got, const Specialization& spec) { expected.check(got, host.m, spec, false); });
    }
  }

  TEST_CASE("inf and NaN in x stay in their rows") {
    std::uint64_t seed = 8000;
    for (const auto& [layout, width] : with_each_layout({33, 32})) {
      HostCase host = HostCase::random(21, {40, width, 8}, 256, layout, ++seed);
      const std::uint16_t specials[] = {0x7c00, 0xfc00, 0x7e00, 0x7bff, 0x0001};
      for (std::uint64_t i = 0; i < std::size(specials); ++i) host.x[(4 * i + 1) * host.k + 37 * i + 5] = specials[i];
      Expected expected(host);
      for_each_candidate(
          host, [&](const Outputs& got, const Specialization& spec) { expected.check(got, host.m, spec, false); });
    }
  }

  TEST_CASE("subnormal x counts to its last bit") {
    std::uint64_t seed = 8500;
    for (const auto& [layout, width] : with_each_layout({33, 32})) {
      HostCase host = HostCase::random(21, {40, width, 8}, 256, layout, ++seed);
      std::mt19937_64 random(seed);
      for (auto& x : host.x) x = static_cast<std::uint16_t>((random() & 0x8000u) | (random() % 0x0800u));
      for (auto& scales : host.scales) {
        for (auto& scale : scales) scale = f16(static_cast<float>(64 + random() % 64));
      }
      Expected expected(host);
      for_each_candidate(
          host, [&](const Outputs& got, const Specialization& spec) { expected.check(got, host.m, spec, false); });
    }
  }

  TEST_CASE("more tiles of rows than a grid's y extent, and offsets past 2^31 elements") {
    {
      const std::uint64_t m = 65535 * 8 + 9;
      const HostCase host = HostCase::random(m, {8, 8, 8}, 128, WeightLayout::k8n, 9000);
      DeviceCase device(host);
      Expected expected(host, rows_for(host, {m, m - 1, 65535 * 8, 65535 * 8 + 1}, 1e6));
      run_kernels(gpu().candidates(host.problem(), true), device, expected, {m});
    }
    // M*N past 2^31; x repeats, so that the host need not make it all.
    const std::uint64_t m = 530'003;
    if (!has_memory_for("M*N past 2^31 elements", 2 * m * (4096 + 8 + 8 + 128) + (1u << 30))) return;
    HostCase host = HostCase::random(m, {4096, 8, 8}, 128, WeightLayout::nk8, 9001);
    GuardedBuffer q(2 * m * 4096);
    q.fill(0xff);
    HostCase narrow = host;  // its device copy holds all but q
    narrow.n[0] = 8;
    narrow.words[0].resize(8 * 16);
    narrow.scales[0].resize(8);
    DeviceCase device(narrow);
    GuardedBuffer words(host.words[0].size() * 4);
    GuardedBuffer scales(host.scales[0].size() * 2);
    words.upload(host.words[0].data());
    scales.upload(host.scales[0].data());
    device.poison();
    qkvjit::QkvTensors tensors = device.tensors();
    const int ordinal = gpu().context.info().ordinal;
    using qkvjit::DType;
    using qkvjit::TensorView;
    tensors.q = TensorView::matrix(q.data(), DType::f16, static_cast<std::int64_t>(m), 4096, ordinal);
    tensors.w_q_packed = TensorView::matrix(words.data(), DType::u32, 4096, 16, ordinal);
    tensors.scales_q = TensorView::matrix(scales.data(), DType::f16, 1, 4096, ordinal);
    const QkvPlan plan(gpu().cache, gpu().context, host.problem(), {.binding = qkvjit::Binding::lazy});
    plan(tensors, gpu().stream);
    gpu().synchronize(gpu().stream);
    CHECK(q.guard_damage().empty());
    // The last rows, whose elements lie past 2^31, as a case of their own.
    const std::uint64_t tail = 40;
    HostCase last = host;
    last.m = tail;
    last.x.assign(host.x.end() - static_cast<std::ptrdiff_t>(tail * host.k), host.x.end());
    Outputs got = sized_outputs(last);
    const qkvjit::ContextScope scope(*gpu().context.state());
    gpu().check(gpu().driver.cuMemcpyDtoH(got[0].data(), q.address() + (m - tail) * 4096 * 2, tail * 4096 * 2),
                "cuMemcpyDtoH");
    for (const std::size_t matrix : {1, 2}) {
      gpu().check(
          gpu().driver.cuMemcpyDtoH(
              got[matrix].data(), device.output(static_cast<int>(matrix)).address() + (m - tail) * 8 * 2, tail * 8 * 2),
          "cuMemcpyDtoH");
    }
    Expected(last).check(got, tail, plan.row(m));
  }
}

// Small ragged shapes, every pipeline, layout and tile once: what compute-sanitizer runs.
TEST_SUITE("sanitize") {
  TEST_CASE("every pipeline, layout and tile on small ragged shapes") {
    std::uint64_t seed = 100;
    for (const WeightLayout layout : kLayouts) {
      for (const auto& n : {std::array<std::uint64_t, 3>{40, 8, 104}, {33, 1, 7}}) {
        const HostCase host = HostCase::random(35, n, 384, layout, ++seed);
        DeviceCase device(host);
        Expected expected(host);
        run_kernels(gpu().candidates(host.problem(), true), device, expected, {1, 19, 35});
      }
      const HostCase host = HostCase::random(19, {24, 40, 9}, 256, layout, ++seed);
      DeviceCase device(host, {1, 1, 3, 1, 5, 7, 1, 3, 1, 5});
      Expected expected(host);
      run_kernels(gpu().candidates(host.problem(), false), device, expected, {3, 19});
    }
  }
}
