// SPDX-License-Identifier: Apache-2.0
// tune() on the device: a small problem is tuned, the table survives its file, and a plan that follows it computes what
// it should, also where another layer lends the memory.
#include "qkvjit/tune.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <string>

#include "gpu/gpu_fixture.h"
#include "qkvjit/select.h"

using namespace qkvtest;
using qkvjit::QkvPlan;
using qkvjit::TuningTable;

TEST_SUITE("tune") {
  TEST_CASE("tuned tiles: a row for each M and promise, the file, and plans that follow it are right") {
    for (const WeightLayout layout : {WeightLayout::k8n, WeightLayout::prepacked}) {
      const HostCase host = HostCase::random(130, {512, 128, 128}, 1024, layout, 77);
      qkvjit::TuneOptions options{.ms = {1, 16, 40, 130}, .batches = 3, .rest_ms = 2};
      const std::size_t bytes = tune_memory_bytes(host.problem(), gpu().context.info(), options);
      const GuardedBuffer lent(bytes);
      if (layout == WeightLayout::k8n) options.memory = lent.data(), options.memory_bytes = lent.bytes();
      const TuningTable table = tune(gpu().cache, gpu().context, host.problem(), options);
      CHECK(lent.guard_damage().empty());
      REQUIRE(table.rows().size() == 8);
      for (const auto& row : table.rows()) {
        CHECK(row.median_us > 0.1);
        CHECK(row.median_us < 10000);
        CHECK(row.min_us <= row.median_us);
        CHECK(row.median_us <= row.max_us);
      }
      const std::string file = (std::filesystem::temp_directory_path() / "qkvjit_gpu_tuning.json").string();
      table.save(file);
      CHECK(TuningTable::load(file) == table);
      std::filesystem::remove(file);

      DeviceCase device(host);
      Expected expected(host);
      for (const bool promise : {false, true}) {
        const QkvPlan plan(gpu().cache, gpu().context, host.problem(),
                           {.weights_are_constant = promise, .tuning = &table});
        for (const std::uint64_t m : {1, 7, 16, 40, 41, 130}) {
          device.poison();
          plan(device.tensors(m), gpu().stream);
          expected.check(device.outputs(gpu().stream, m), m, plan.row(m));
        }
      }
    }
  }
}
