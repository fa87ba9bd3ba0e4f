// SPDX-License-Identifier: Apache-2.0
// Lists of problems (problems.json): what is read, what is refused and how, and which kernels follow from them.
#include "tools/problem_list.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "qkvjit/error.h"

namespace {

using namespace qkvjit;

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_SUITE("problem_list") {
  TEST_CASE("shapes, models and ranks, one problem a layout") {
    const auto problems = tools::parse_problem_list("p", R"({"problems": [
        {"n_q": 64, "n_k": 32, "n_v": 16, "k": 256, "layout": ["k8n", "prepacked"], "group_size": 128},
        {"model": "llama-3-8b", "tp": 2, "layout": "nk8"}]})");
    REQUIRE(problems.size() == 3);
    CHECK(problems[0].n_q == 64);
    CHECK(problems[0].n_v == 16);
    CHECK(problems[1].layout == WeightLayout::prepacked);
    CHECK(problems[2].n_q == 2048);
    CHECK(problems[2].n_k == 512);
    CHECK(problems[2].k == 4096);
    CHECK(problems[2].layout == WeightLayout::nk8);
  }

  TEST_CASE("every error names the item, what it got and what it needs") {
    struct Wrong {
      const char* text;
      const char* place;
      const char* reason;
    };
    for (const auto& [text, place, reason] : std::initializer_list<Wrong>{
             {"", "list", "valid JSON"},
             {"[]", "list", "needs a list"},
             {"{}", "list", "needs a list"},
             {R"({"problems": 3})", "list", "got 3"},
             {"[7]", "problems[0]", "got 7, needs an object"},
             {R"([{"model": "llama-3-8b"}, {"model": "gpt"}])", "problems[1]", "got 'gpt', needs one of"},
             {R"([{"model": 3}])", "problems[0].model", "got 3"},
             {R"([{"model": "llama-3-8b", "tp": 3}])", "problems[0]", "got 3, needs a divisor"},
             {R"([{"model": "llama-3-8b", "tp": 5000000000}])", "problems[0].tp", "got 5000000000"},
             {R"([{"model": "llama-3-8b", "k": 4096}])", "problems[0].k", "beside \"model\""},
             {R"([{"n_q": 8, "n_k": 8, "n_v": 8, "k": 128, "tp": 2}])", "problems[0].tp", "\"model\" only"},
             {R"([{"n_q": 8, "n_k": 8, "k": 128}])", "problems[0].n_v", "is missing"},
             {R"([{"n_q": -8, "n_k": 8, "n_v": 8, "k": 128}])", "problems[0].n_q", "got -8, needs a positive"},
             {R"([{"n_q": "8", "n_k": 8, "n_v": 8, "k": 128}])", "problems[0].n_q", "got \"8\""},
             {R"([{"n_q": 8, "n_k": 8, "n_v": 8, "k": 100}])", "problems[0]", "128"},
             {R"([{"n_q": 8, "n_k": 8, "n_v": 8, "k": 128, "layout": "kn"}])", "problems[0].layout",
              "got \"kn\", needs one of k8n, nk8, prepacked"},
             {R"([{"n_q": 8, "n_k": 8, "n_v": 8, "k": 128, "layout": []}])", "problems[0].layout", "empty"},
             {R"([{"n_q": 8, "n_k": 8, "n_v": 8, "k": 128, "scale_dtype": "f8"}])", "problems[0].scale_dtype",
              "got \"f8\""},
             {R"([{"n_q": 8, "n_k": 8, "n_v": 8, "k": 128, "lay": 1}])", "problems[0]", "no field"},
         }) {
      CAPTURE(std::string(text));
      try {
        (void)tools::parse_problem_list("list", text);
        FAIL_CHECK("was taken");
      } catch (const InvalidProblem& error) {
        CHECK_MESSAGE(has(error.what(), place), error.what());
        CHECK_MESSAGE(has(error.what(), reason), error.what());
      }
    }
    CHECK_THROWS_WITH_AS((void)tools::read_problem_list("/nonexistent.json"), doctest::Contains("/nonexistent.json"),
                         InvalidProblem);
  }

  TEST_CASE("specialisations: every row for every M, aligned or not, with the promise or without, each once") {
    const auto problems = tools::parse_problem_list("p", R"([{"n_q": 4096, "n_k": 1024, "n_v": 1024, "k": 4096}])");
    const Target target = parse_target("sm_90a");
    const auto specs = tools::specializations_for({problems[0], problems[0]}, {target, target});
    std::size_t found = 0;
    for (const bool aligned : {true, false}) {
      for (const bool constant : {true, false}) {
        for (const SelectedRow& row : select_rows(problems[0], typical_device(90), target, aligned, constant)) {
          const auto count = std::count(specs.begin(), specs.end(), row.spec);
          CHECK(count == 1);
          found += static_cast<std::size_t>(count);
        }
      }
    }
    CHECK(found >= specs.size());
  }
}
