// SPDX-License-Identifier: Apache-2.0
// qkvjit-bench without a GPU: which rows it plans, models and their shards, what is left to do after a stop, and what
// it prints and writes; the tool itself by its exit codes and output.
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "qkvjit/error.h"
#include "tools/bench_report.h"
#include "tools/bench_rows.h"

using namespace qkvbench;
using qkvjit::InvalidProblem;

namespace {

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

Report small_report() {
  Report report{.device = "Fake H200",
                .driver = "CUDA 13.0",
                .nvrtc = "13.0",
                .commit = "abc",
                .templates_digest = "12ab",
                .date = "2026-12-01T00:00:00Z",
                .protocol = "made up",
                .clock_mhz = 1980,
                .read_tb_s = 4.5,
                .rows = {}};
  for (Row row : plan_rows({{4096, 4096, 1024, 1024}, {8192, 8192, 1024, 1024}}, {1, 16, 64},
                           {WeightLayout::prepacked, WeightLayout::k8n}, {false, true})) {
    row.pipeline = "decode";
    row.tile = "m16n96_w1x1x8_s2_b1";
    row.us = 5.25 + static_cast<double>(row.m) / 16 + (row.dependent_launch ? 0 : 1);
    row.us_min = row.us - 0.25, row.us_max = row.us + 0.5;
    row.limit_us = 2.5;
    if (row.layout == WeightLayout::prepacked) row.cublas_f16_us = 15.5;
    row.launched_dependent = row.dependent_launch;
    row.verified = true;
    report.rows.push_back(row);
  }
  report.rows.back().verified = false;
  return report;
}

struct Result {
  int code = -1;
  std::string out;
};

/// The tool with `arguments`, in a place where it finds no GPU; standard output and error together.
Result bench(const std::string& arguments) {
  const std::string command = fmt::format("CUDA_VISIBLE_DEVICES= '{}' {} 2>&1", QKVJIT_BENCH_TOOL, arguments);
  Result result;
  FILE* pipe = popen(command.c_str(), "r");
  REQUIRE(pipe != nullptr);
  char buffer[4096];
  for (std::size_t n = 0; (n = fread(buffer, 1, sizeof(buffer), pipe)) > 0;) result.out.append(buffer, n);
  const int status = pclose(pipe);
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return result;
}

}  // namespace

TEST_SUITE("bench") {
  TEST_CASE("shapes are read back, anything else is refused") {
    CHECK(parse_shape("4096:4096,1024,512") == Shape{4096, 4096, 1024, 512});
    CHECK(shape_text(parse_shape("3584:3584,512,512")) == "3584:3584,512,512");
    for (const char* bad : {"", "4096", "4096:1,2", "4096:1,2,3,4", "4096:0,1,1", "x:1,1,1", "4096:1,1,1 "}) {
      CHECK_THROWS_AS(parse_shape(bad), InvalidProblem);
    }
  }

  TEST_CASE("models: whole heads a rank, KV heads replicated where there are fewer than ranks") {
    CHECK(model_shape("llama-2-7b", 1) == Shape{4096, 4096, 4096, 4096});
    CHECK(model_shape("llama-3-8b", 1) == Shape{4096, 4096, 1024, 1024});
    CHECK(model_shape("llama-3-70b", 8) == Shape{8192, 1024, 128, 128});
    CHECK(model_shape("llama-3-70b", 16) == Shape{8192, 512, 128, 128});
    CHECK(model_shape("qwen2.5-7b", 4) == Shape{3584, 896, 128, 128});
    CHECK_THROWS_WITH_AS(model_shape("gpt-2", 1), doctest::Contains("llama-3-8b"), InvalidProblem);
    CHECK_THROWS_AS(model_shape("llama-3-8b", 5), InvalidProblem);
    CHECK_THROWS_AS(model_shape("qwen2.5-7b", 0), InvalidProblem);
    for (const Model& model : models()) CHECK(model_shape(model.name, 1).k == model.hidden);
  }

  TEST_CASE("the sets: every goal shape and M; no row twice") {
    const auto rows = plan_rows(full_shapes(), full_ms(),
                                {WeightLayout::k8n, WeightLayout::nk8, WeightLayout::prepacked}, {false, true});
    CHECK(rows.size() == full_shapes().size() * full_ms().size() * 6);
    std::size_t twice = 0;
    for (std::size_t i = 0; i < rows.size(); ++i)
      for (std::size_t j = 0; j < i; ++j) twice += rows[i].same_request(rows[j]) ? 1 : 0;
    CHECK(twice == 0);
    const auto all = full_shapes();
    for (const Shape& shape : core_shapes()) CHECK(std::count(all.begin(), all.end(), shape) == 1);
    CHECK(bytes_of({4096, 4096, 4096, 4096}, 1) == doctest::Approx(4096.0 * 12288 * (0.5 + 2. / 128) + 2 * 16384));
  }

  TEST_CASE("the prefill sets: the shapes and M that are compared with cuBLAS, odd M in the sweep, none twice") {
    CHECK(prefill_shapes().size() == 5);
    const auto has_shape = [](const Shape& shape) {
      const auto shapes = prefill_shapes();
      return std::find(shapes.begin(), shapes.end(), shape) != shapes.end();
    };
    for (const Shape& shape : {Shape{4096, 4096, 4096, 4096},
                               {8192, 8192, 8192, 8192},
                               {4096, 4096, 1024, 1024},
                               {8192, 8192, 1024, 1024},
                               {3584, 3584, 512, 512}}) {
      CHECK(has_shape(shape));
    }
    CHECK(prefill_ms() == std::vector<std::uint64_t>{128, 256, 512, 1024, 2048, 4096, 8192});
    const auto sweep = prefill_sweep_ms();
    CHECK(sweep.front() == 65);
    CHECK(sweep.back() == 8192);
    CHECK(std::is_sorted(sweep.begin(), sweep.end()));
    CHECK(std::adjacent_find(sweep.begin(), sweep.end()) == sweep.end());
    for (const std::uint64_t m : {77, 130, 333, 777, 1500}) CHECK(std::count(sweep.begin(), sweep.end(), m) == 1);
  }

  TEST_CASE("groups: what has the same operands is timed together, also where a stopped run left half of it") {
    auto rows = plan_rows({{4096, 4096, 1024, 1024}, {8192, 8192, 1024, 1024}}, {128, 256}, {WeightLayout::prepacked},
                          {false, true});
    REQUIRE(rows.size() == 8);
    CHECK(group_length(rows) == 2);
    CHECK(group_length(std::span(rows).subspan(1)) == 1);
    CHECK(group_length({}) == 0);
    CHECK(most_tokens(rows, rows[0].shape) == 256);
    CHECK(most_tokens(rows, {1, 1, 1, 1}) == 0);
    Row rested = rows[0], restless = rows[0];
    restless.interleaved = true;
    CHECK(rested.same_operands(restless));
    CHECK_FALSE(rested.same_request(restless));
    rested.verified = true, rested.us = 9;
    CHECK(remaining({restless, rows[0]}, {rested}).size() == 1);
  }

  TEST_CASE("bursts last 2 to 5 ms and take at least two calls; weight sets by M") {
    for (const double us : {20., 28., 73., 140., 540., 1500.}) {
      CHECK(burst_calls(us) * us >= 2000);
      CHECK(burst_calls(us) * us <= 5000);
    }
    CHECK(burst_calls(4700) == 2);
    CHECK(burst_calls(0) == 192);
    CHECK(sets_for(64, 25) == 25);
    CHECK(sets_for(256, 25) == 25);
    CHECK(sets_for(257, 25) == 8);
    CHECK(sets_for(8192, 3) == 3);
  }

  TEST_CASE("many tokens: TFLOP/s and the ratio to cuBLAS in table, JSON, CSV and a panel of their own") {
    Report report = small_report();
    Row row = report.rows[0];
    row.m = 1024;
    row.us = 70, row.us_min = 69, row.us_max = 72;
    row.cublas_f16_us = 73.5, row.cublas_us_min = 73, row.cublas_us_max = 75;
    CHECK(tflops_of(row) == doctest::Approx(2.0 * 1024 * 4096 * 6144 / 70e-6 / 1e12));
    CHECK(*ratio_of(row) == doctest::Approx(1.05));
    const std::string line = table_line(row, 4.5);
    CHECK(has(line, "736.3"));
    CHECK(has(line, "1.05x"));
    CHECK_FALSE(has(line, "without rest"));
    const std::string few = to_svg(report);
    CHECK_FALSE(has(few, "TFLOP/s"));
    report.rows.push_back(row);
    row.interleaved = true, row.us = 60;
    report.rows.push_back(row);
    CHECK(has(table_line(row, 4.5), "without rest"));
    const std::string svg = to_svg(report);
    CHECK(has(svg, "TFLOP/s"));
    CHECK_FALSE(has(svg, "nan"));
    CHECK_FALSE(has(svg, "inf"));
    // What was timed without rest is not drawn beside what was timed with it.
    Report rested = report;
    rested.rows.pop_back();
    CHECK(to_svg(rested) == svg);
    const std::string json = to_json(report);
    for (const char* key : {"\"tflops\"", "\"ratio\"", "\"interleaved\"", "\"cublas_us_min\"", "\"cublas_us_max\""}) {
      CHECK_MESSAGE(has(json, key), key);
    }
    CHECK(to_json(from_json(json)) == json);
    CHECK(has(to_csv(report), ",1.0500,off\n"));
    row.us = 0;
    CHECK(tflops_of(row) == 0);
    CHECK_FALSE(ratio_of(row));
    // A report of many tokens alone, of one M, and without cuBLAS still draws.
    report.rows.erase(report.rows.begin(), report.rows.end() - 2);
    report.rows.pop_back();
    report.rows[0].cublas_f16_us.reset();
    CHECK_FALSE(has(to_svg(report), "nan"));
  }

  TEST_CASE("resume: what is verified and timed is not done again, what was wrong is") {
    const Report before = small_report();
    std::vector<Row> wanted = before.rows;
    wanted.push_back(wanted[0]);
    wanted.back().m = 7;
    const auto left = remaining(wanted, before.rows);
    REQUIRE(left.size() == 2);
    CHECK(left[0].same_request(before.rows.back()));
    CHECK(left[1].m == 7);
  }

  TEST_CASE("JSON comes back as it was; what is no report is refused") {
    const Report report = small_report();
    const Report back = from_json(to_json(report));
    CHECK(to_json(back) == to_json(report));
    CHECK(back.rows.size() == report.rows.size());
    CHECK(back.rows[2].us == report.rows[2].us);
    CHECK_FALSE(back.rows.back().verified);
    CHECK(back.clock_mhz == report.clock_mhz);
    for (const char* bad : {"", "{}", "[1]", "{\"device\": 3}"}) CHECK_THROWS_AS(from_json(bad), qkvjit::Error);
    const std::string text = to_json(report);
    for (const char* key : {"\"device\"",
                            "\"driver\"",
                            "\"nvrtc\"",
                            "\"commit\"",
                            "\"date\"",
                            "\"clock_mhz\"",
                            "\"read_tb_s\"",
                            "\"protocol\"",
                            "\"k\"",
                            "\"n_q\"",
                            "\"m\"",
                            "\"group\"",
                            "\"dtype\"",
                            "\"layout\"",
                            "\"pipeline\"",
                            "\"tile\"",
                            "\"dependent_launch\"",
                            "\"us\"",
                            "\"us_min\"",
                            "\"us_max\"",
                            "\"limit_us\"",
                            "\"cublas_f16_us\""}) {
      CHECK_MESSAGE(has(text, key), key);
    }
  }

  TEST_CASE("the table: bandwidth, share of the limit, ratio; a wrong row has no time") {
    const Report report = small_report();
    const std::string line = table_line(report.rows[0], report.read_tb_s);
    CHECK(has(line, "4096:4096,1024,1024"));
    CHECK(has(line, "6.31"));   // µs
    CHECK(has(line, "2.46x"));  // 15.5 / 6.3125
    CHECK(has(table_line(report.rows.back(), 4.5), "WRONG"));
    const std::string csv = to_csv(report);
    CHECK(std::count(csv.begin(), csv.end(), '\n') == static_cast<std::ptrdiff_t>(report.rows.size()) + 1);
  }

  TEST_CASE("the plot: a panel a shape, the lines named, the faster launch drawn") {
    const std::string svg = to_svg(small_report());
    CHECK(svg.rfind("<svg", 0) == 0);
    CHECK(has(svg, "</svg>"));
    for (const char* part : {"K = 4096, N = 4096+1024+1024", "K = 8192", "cuBLAS f16", "limit", "prepacked", "k8n",
                             "tokens M", "prefers-color-scheme:dark"}) {
      CHECK_MESSAGE(has(svg, part), part);
    }
    CHECK_FALSE(has(svg, "nan"));
    CHECK_FALSE(has(svg, "nk8"));
  }

  TEST_CASE("files are replaced whole or not at all") {
    const std::string path =
        fmt::format("{}/qkvjit_bench_{}.json", std::filesystem::temp_directory_path().string(), getpid());
    write_file(path, "one");
    write_file(path, "two");
    CHECK(read_file(path) == "two");
    std::filesystem::remove(path);
    CHECK_THROWS_AS(write_file("/nonexistent/folder/file", "x"), qkvjit::Error);
    CHECK_THROWS_AS(read_file(path), qkvjit::Error);
  }

  TEST_CASE("the tool: models, a plan, an earlier run; without a GPU a sentence and exit code 2") {
    if (!std::filesystem::exists(QKVJIT_BENCH_TOOL)) {
      std::puts("SKIPPED: qkvjit-bench is not built here (builds with sanitizers leave the tools away)");
      return;
    }
    const Result models_list = bench("--list-models");
    CHECK(models_list.code == 0);
    CHECK(has(models_list.out, "llama-3-8b"));
    const Result plan = bench("--plan --model llama-3-8b --tp 2 --m 1,16 --layout k8n --dependent-launch on");
    CHECK(plan.code == 0);
    CHECK(plan.out ==
          "4096:2048,512,512      M = 1     k8n       dependent launch on\n"
          "4096:2048,512,512      M = 16    k8n       dependent launch on\n");
    const Result prefill = bench("--plan --set prefill");
    CHECK(prefill.code == 0);
    CHECK(std::count(prefill.out.begin(), prefill.out.end(), '\n') == 5 * 7 * 2);
    CHECK_FALSE(has(prefill.out, "k8n"));
    const Result odd = bench("--plan --set prefill-sweep --shape 4096:4096,1024,1024 --m 64,333 --interleave");
    CHECK(has(odd.out, "M = 333   prepacked dependent launch on, without rest"));
    CHECK(has(odd.out, "M = 64    prepacked dependent launch on\n"));
    CHECK(bench("--set prefil").code == 2);
    CHECK(bench("--m 1 --tuning /nonexistent.json").code == 3);
    const std::string json =
        fmt::format("{}/qkvjit_bench_{}.json", std::filesystem::temp_directory_path().string(), getpid());
    write_file(json, to_json(small_report()));
    const Result from = bench(fmt::format("--from '{0}' --svg '{0}.svg' --csv '{0}.csv'", json));
    CHECK(from.code == 0);
    CHECK(has(from.out, "Fake H200"));
    CHECK(read_file(json + ".svg") == to_svg(small_report()));
    CHECK(read_file(json + ".csv") == to_csv(small_report()));
    for (const char* suffix : {"", ".svg", ".csv"}) std::filesystem::remove(json + suffix);
    CHECK(bench("--shape 12").code == 2);
    CHECK(bench("--model gpt-2").code == 2);
    CHECK(bench("--layout k9n").code == 2);
    const Result none = bench("--m 1");
    CHECK(none.code == 2);
    CHECK(has(none.out, "qkvjit-bench: "));
  }
}
