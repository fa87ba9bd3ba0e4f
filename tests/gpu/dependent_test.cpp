// SPDX-License-Identifier: Apache-2.0
// Dependent launches (PlanOptions::weights_are_constant) and prepacking: what may be read early is, what may not is
// not, in streams and in graphs; packed words are those of the table, and come back bit for bit.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <cstring>

#include "cuda/nvrtc.h"
#include "gpu/early_writer.h"
#include "gpu/gpu_fixture.h"
#include "support/packed_reference.h"

using namespace qkvtest;
using qkvjit::Binding;
using qkvjit::ContextScope;
using qkvjit::QkvPlan;
using qkvjit::QkvProblem;
using qkvjit::QkvTensors;

namespace {

/// early_writer.cu, compiled for this GPU.
class EarlyWriter {
 public:
  EarlyWriter() {
    const auto nvrtc = qkvjit::open_nvrtc();
    nvrtcProgram program = nullptr;
    REQUIRE(nvrtc->nvrtcCreateProgram(&program, kEarlyWriterSource, "early_writer.cu", 0, nullptr, nullptr) ==
            NVRTC_SUCCESS);
    const std::string arch = "--gpu-architecture=" + to_string(gpu().cache.target_for(gpu().context.info()));
    const char* options[] = {arch.c_str()};
    REQUIRE(nvrtc->nvrtcCompileProgram(program, 1, options) == NVRTC_SUCCESS);
    std::size_t size = 0;
    nvrtc->nvrtcGetPTXSize(program, &size);
    std::string ptx(size, '\0');
    nvrtc->nvrtcGetPTX(program, ptx.data());
    nvrtc->nvrtcDestroyProgram(&program);
    gpu().check(gpu().driver.cuModuleLoadData(&module_, ptx.c_str()), "cuModuleLoadData");
    gpu().check(gpu().driver.cuModuleGetFunction(&function_, module_, "early_writer"), "cuModuleGetFunction");
  }
  ~EarlyWriter() { gpu().driver.cuModuleUnload(module_); }
  EarlyWriter(const EarlyWriter&) = delete;  // owns the module
  EarlyWriter& operator=(const EarlyWriter&) = delete;

  /// Copies `to.bytes()` from `from`, late.
  void write(const GuardedBuffer& to, const GuardedBuffer& from, unsigned delay_ns, CUstream stream) const {
    CUdeviceptr destination = to.address(), source = from.address();
    unsigned long long words = to.bytes() / 4;
    void* arguments[] = {&destination, &source, &words, &delay_ns};
    gpu().check(gpu().driver.cuLaunchKernel(function_, 4, 1, 1, 256, 1, 1, 0, stream, arguments, nullptr),
                "cuLaunchKernel");
  }

 private:
  CUmodule module_ = nullptr;
  CUfunction function_ = nullptr;
};

/// A copy of `bytes` on the device.
GuardedBuffer copy_of(const void* data, std::size_t bytes) {
  GuardedBuffer buffer(bytes);
  buffer.upload(data);
  return buffer;
}

Outputs run(const QkvPlan& plan, DeviceCase& device) {
  device.poison();
  plan(device.tensors(), gpu().stream);
  return device.outputs(gpu().stream, device.host().m);
}

enum class Written : std::uint8_t { x, weights, scales };

/// 10,000 times: a kernel that triggers early writes one operand of two states just before the launch.
void check_late_writes(Written written, bool promise, const HostCase& first, const HostCase& second) {
  const ContextScope scope(*gpu().context.state());
  const EarlyWriter writer;
  DeviceCase device(first);
  const QkvPlan plan(gpu().cache, gpu().context, first.problem(), {.weights_are_constant = promise});
  GuardedBuffer& target = written == Written::x         ? device.x()
                          : written == Written::weights ? device.words(1)
                                                        : device.scales(2);
  const auto state = [&](const HostCase& host) {
    if (written == Written::x) return copy_of(host.x.data(), host.x.size() * 2);
    if (written == Written::scales) return copy_of(host.scales[2].data(), host.scales[2].size() * 2);
    const auto words = host.device_words(1);
    return copy_of(words.data(), words.size() * 4);
  };
  const GuardedBuffer states[] = {state(first), state(second)};
  Outputs want[2];
  for (int i : {1, 0}) {
    gpu().check(gpu().driver.cuMemcpyDtoDAsync(target.address(), states[i].address(), target.bytes(), gpu().stream),
                "cuMemcpyDtoDAsync");
    gpu().synchronize(gpu().stream);
    want[i] = run(plan, device);
  }
  CHECK_FALSE(want[0] == want[1]);
  int wrong = 0;
  std::vector<std::uint16_t> got[3];
  for (std::size_t i = 0; i < 3; ++i) got[i].resize(want[0][i].size());
  for (int round = 0; round < 10'000; ++round) {
    const auto now = static_cast<std::size_t>(round % 2);
    writer.write(target, states[now], 500u * static_cast<unsigned>(round % 13), gpu().stream);
    plan(device.tensors(), gpu().stream);
    for (int i = 0; i < 3; ++i) {
      gpu().check(
          gpu().driver.cuMemcpyDtoHAsync(got[i].data(), device.output(i).address(), got[i].size() * 2, gpu().stream),
          "cuMemcpyDtoHAsync");
    }
    gpu().synchronize(gpu().stream);
    for (std::size_t i = 0; i < 3; ++i) wrong += got[i] != want[now][i] ? 1 : 0;
  }
  CHECK_MESSAGE(wrong == 0,
                first.name() << ": " << wrong << " of 30000 outputs came from the operand before the write");
}

}  // namespace

TEST_SUITE("dependent") {
  TEST_CASE("x written late by a kernel that triggers early: the promised launch waits for it") {
    for (const auto& [m, layout] : {std::pair<std::uint64_t, WeightLayout>{1, WeightLayout::prepacked},
                                    {8, WeightLayout::k8n},
                                    {16, WeightLayout::prepacked},
                                    {33, WeightLayout::prepacked}}) {
      HostCase second = HostCase::random(m, {96, 40, 8}, 1024, layout, 51);
      const HostCase first = HostCase::random(m, {96, 40, 8}, 1024, layout, 50);
      second.words = first.words;
      second.scales = first.scales;
      check_late_writes(Written::x, true, first, second);
    }
  }

  TEST_CASE("without the promise weights, scales and x may be written just before") {
    const HostCase first = HostCase::random(4, {96, 40, 8}, 1024, WeightLayout::k8n, 52);
    const HostCase second = HostCase::random(4, {96, 40, 8}, 1024, WeightLayout::k8n, 53);
    for (const Written written : {Written::weights, Written::scales, Written::x}) {
      check_late_writes(written, false, first, second);
    }
  }

  TEST_CASE("10,000 replays of a graph of dependent launches, outputs poisoned in it") {
    for (const WeightLayout layout : kLayouts) {
      for (const std::uint64_t m : {1, 16, 40}) {
        const HostCase host = HostCase::random(m, {160, 40, 8}, 1024, layout, 54 + m);
        DeviceCase device(host), other(host);
        const QkvPlan plan(gpu().cache, gpu().context, host.problem(), {.weights_are_constant = true});
        const Outputs want = run(plan, device);
        Expected(host).check(want, m, plan.row(m));
        const ContextScope scope(*gpu().context.state());
        CUstream stream = gpu().stream;
        gpu().check(gpu().driver.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "begin");
        for (int i = 0; i < 3; ++i) {
          gpu().check(gpu().driver.cuMemsetD8Async(device.output(i).address(), 0xff, device.output(i).bytes(), stream),
                      "cuMemsetD8Async");
        }
        // Chains of dependent launches, the poisoned outputs written by the second and the last.
        plan(other.tensors(), stream);
        plan(device.tensors(), stream);
        plan(other.tensors(), stream);
        plan(device.tensors(), stream);
        CUgraph graph = nullptr;
        CUgraphExec exec = nullptr;
        gpu().check(gpu().driver.cuStreamEndCapture(stream, &graph), "end");
        gpu().check(gpu().driver.cuGraphInstantiate(&exec, graph, 0), "cuGraphInstantiate");
        int wrong = 0;
        for (int round = 0; round < 10'000; ++round) {
          gpu().check(gpu().driver.cuGraphLaunch(exec, stream), "cuGraphLaunch");
          if (round % 50 != 49) continue;
          wrong += device.outputs(stream, m) != want ? 1 : 0;
          wrong += other.outputs(stream, m) != want ? 1 : 0;
        }
        CHECK(wrong == 0);
        gpu().driver.cuGraphExecDestroy(exec);
        gpu().driver.cuGraphDestroy(graph);
      }
    }
  }

  TEST_CASE("every M from 1 to 64, every layout, with the promise and without") {
    for (const WeightLayout layout : kLayouts) {
      const HostCase host = HostCase::random(64, {256, 72, 40}, 1024, layout, 59);
      DeviceCase device(host);
      Expected expected(host);
      for (const bool promise : {false, true}) {
        const QkvPlan plan(gpu().cache, gpu().context, host.problem(), {.weights_are_constant = promise});
        for (std::uint64_t m = 1; m <= 64; ++m) {
          CAPTURE(m);
          device.poison();
          plan(device.tensors(m), gpu().stream);
          expected.check(device.outputs(gpu().stream, m), m, plan.row(m));
        }
      }
      device.check_inputs();
    }
  }

  TEST_CASE("a chain in which each launch reads what the one before wrote") {
    // K = N_q: the outputs Q of one are the x of the next.
    for (const std::uint64_t m : {1, 8, 16, 32}) {
      const HostCase host = HostCase::random(m, {256, 40, 8}, 256, WeightLayout::prepacked, 60 + m);
      DeviceCase device(host);
      const QkvPlan dependent(gpu().cache, gpu().context, host.problem(), {.weights_are_constant = true});
      GuardedBuffer buffers[2] = {GuardedBuffer(m * 256 * 2), GuardedBuffer(m * 256 * 2)};
      const auto chain = [&](bool wait_between) {
        buffers[0].upload(host.x.data());
        for (int i = 0; i < 20; ++i) {
          QkvTensors tensors = device.tensors();
          tensors.x.data = buffers[i % 2].data();
          tensors.q.data = buffers[1 - i % 2].data();
          dependent(tensors, gpu().stream);
          if (wait_between) gpu().synchronize(gpu().stream);
        }
        gpu().synchronize(gpu().stream);
        std::vector<std::uint16_t> result(m * 256);
        buffers[0].download(result.data());
        return result;
      };
      const auto want = chain(true);
      for (int round = 0; round < 200; ++round) REQUIRE(chain(false) == want);
    }
  }

  TEST_CASE("prepack makes the words of the table, and unpack gives the raw ones back") {
    std::uint64_t seed = 70;
    for (const WeightLayout layout : kRawLayouts) {
      for (const auto& [n, k] : {std::pair<std::array<std::uint64_t, 3>, std::uint64_t>{{64, 64, 64}, 128},
                                 {{96, 8, 1}, 384},
                                 {{1000, 17, 130}, 256},
                                 {{512, 128, 192}, 4096}}) {
        const HostCase host = HostCase::random(1, n, k, layout, ++seed);
        CAPTURE(host.name());
        DeviceCase device(host);
        const QkvProblem problem = host.problem();
        GuardedBuffer buffer(qkvjit::packed_bytes(problem));
        buffer.fill(0xff);
        const auto packed =
            prepack(gpu().cache, gpu().context, problem, device.tensors(), buffer.data(), buffer.bytes(), gpu().stream);
        gpu().synchronize(gpu().stream);
        device.check_inputs();
        CHECK(buffer.guard_damage().empty());
        std::vector<std::uint32_t> got(buffer.bytes() / 4);
        buffer.download(got.data());
        std::size_t at = 0;
        for (int i = 0; i < 3; ++i) {
          const auto want = packed_reference(
              k, n[static_cast<std::size_t>(i)],
              [&](std::uint64_t row, std::uint64_t c) { return static_cast<unsigned>(host.weight(i, row, c)) & 15u; });
          CHECK(std::equal(want.begin(), want.end(), got.begin() + static_cast<std::ptrdiff_t>(at)));
          at += want.size();
        }
        CHECK(at == got.size());

        DeviceCase back(host);
        for (int i = 0; i < 3; ++i) back.words(i).fill(0);
        unpack(gpu().cache, gpu().context, packed, back.tensors(), layout, gpu().stream);
        gpu().synchronize(gpu().stream);
        back.check_inputs();
      }
    }
  }

  TEST_CASE("prepack in place equals prepack into a buffer") {
    const HostCase host = HostCase::random(5, {192, 64, 128}, 512, WeightLayout::k8n, 80);
    DeviceCase raw(host), in_place(host);
    const QkvProblem problem = host.problem();
    GuardedBuffer scratch(qkvjit::prepack_scratch_bytes(problem));
    const auto packed = prepack_in_place(gpu().cache, gpu().context, problem, in_place.tensors(), scratch.data(),
                                         scratch.bytes(), gpu().stream);
    gpu().synchronize(gpu().stream);
    CHECK(scratch.guard_damage().empty());
    for (int i = 0; i < 3; ++i) {
      CHECK(in_place.words(i).guard_damage().empty());
      std::vector<std::uint32_t> got(in_place.words(i).bytes() / 4);
      in_place.words(i).download(got.data());
      CHECK(got ==
            packed_reference(host.k, host.n[static_cast<std::size_t>(i)], [&](std::uint64_t row, std::uint64_t c) {
              return static_cast<unsigned>(host.weight(i, row, c)) & 15u;
            }));
    }
    QkvProblem packed_problem = problem;
    packed_problem.layout = WeightLayout::prepacked;
    const QkvPlan plan(gpu().cache, gpu().context, packed_problem);
    in_place.poison();
    plan(packed, in_place.tensors(), gpu().stream);
    Expected(host).check(in_place.outputs(gpu().stream, host.m), host.m, plan.row(host.m));
  }

  TEST_CASE("the launch after prepack() sees its words, promise or not") {
    const HostCase first = HostCase::random(2, {192, 64, 128}, 1024, WeightLayout::k8n, 81);
    const HostCase second = HostCase::random(2, {192, 64, 128}, 1024, WeightLayout::k8n, 82);
    DeviceCase devices[] = {DeviceCase(first), DeviceCase(second)};
    QkvProblem problem = first.problem();
    GuardedBuffer buffer(qkvjit::packed_bytes(problem));
    const auto pack = [&](std::size_t which) {
      return prepack(gpu().cache, gpu().context, problem, devices[which].tensors(), buffer.data(), buffer.bytes(),
                     gpu().stream);
    };
    QkvProblem packed_problem = problem;
    packed_problem.layout = WeightLayout::prepacked;
    const QkvPlan plan(gpu().cache, gpu().context, packed_problem, {.weights_are_constant = true});
    Outputs want[2];
    for (const std::size_t i : {0, 1}) {
      const auto packed = pack(i);
      gpu().synchronize(gpu().stream);
      plan(packed, devices[0].tensors(), gpu().stream);
      want[i] = devices[0].outputs(gpu().stream, 2);
    }
    CHECK_FALSE(want[0] == want[1]);
    int wrong = 0;
    for (int round = 0; round < 5000; ++round) {
      const auto now = static_cast<std::size_t>(round % 2);
      plan(pack(now), devices[0].tensors(), gpu().stream);
      wrong += devices[0].outputs(gpu().stream, 2) != want[now] ? 1 : 0;
    }
    CHECK(wrong == 0);
  }
}
