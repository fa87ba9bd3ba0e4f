// SPDX-License-Identifier: Apache-2.0
// Which target a GPU's code is generated for, for every GPU and NVRTC; names of targets; facts of typical devices.
#include <doctest/doctest.h>

#include <random>
#include <string>
#include <vector>

#include "qkvjit/device_context.h"
#include "qkvjit/error.h"
#include "qkvjit/select.h"

namespace {

using namespace qkvjit;

// As nvrtcGetSupportedArchs of these versions says.
const std::vector<unsigned> kNvrtc12_3{50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90};
const std::vector<unsigned> kNvrtc12_9{50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 103, 120, 121};
const std::vector<unsigned> kNvrtc13_0{75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};

struct Case {
  unsigned sm;
  const std::vector<unsigned>* nvrtc;
  unsigned target;
  bool needs_driver_jit;
};

std::string refusal(const std::string& text) {
  try {
    parse_target(text);
  } catch (const InvalidProblem& error) {
    return error.what();
  }
  return {};
}

}  // namespace

TEST_SUITE("target") {
  TEST_CASE("the exact target where NVRTC has it") {
    for (const auto* nvrtc : {&kNvrtc12_3, &kNvrtc12_9, &kNvrtc13_0}) {
      for (const unsigned sm : *nvrtc) {
        if (sm < 80) continue;
        const TargetChoice choice = choose_target(sm, *nvrtc);
        CHECK(choice.target == Target{.sm = sm});
        CHECK_FALSE(choice.needs_driver_jit);
      }
    }
  }

  TEST_CASE("else a cubin of the same major, else PTX for the nearest older") {
    const std::vector<unsigned> first_blackwell{80, 86, 87, 89, 90, 100, 101, 120};
    for (const Case& c : std::vector<Case>{
             {88, &kNvrtc12_9, 86, false},         // not 87: a cubin of an embedded GPU is for that one alone
             {103, &first_blackwell, 100, false},  // nor 101
             {121, &first_blackwell, 120, false},
             {100, &kNvrtc12_3, 90, true},
             {120, &kNvrtc12_3, 90, true},
             {110, &kNvrtc12_3, 90, true},
             {110, &kNvrtc12_9, 103, true},
             {130, &kNvrtc13_0, 121, true},
             {107, &kNvrtc13_0, 103, false},
             {101, &kNvrtc13_0, 100, true},  // embedded: no cubin but its own
         }) {
      CAPTURE(c.sm);
      const TargetChoice choice = choose_target(c.sm, *c.nvrtc);
      CHECK(choice.target == Target{.sm = c.target});
      CHECK(choice.needs_driver_jit == c.needs_driver_jit);
    }
  }

  TEST_CASE("a cubin runs on its own GPU and on later minors of its major; embedded and 'a' ones on their own alone") {
    for (const auto& [target, sm] : std::vector<std::pair<Target, unsigned>>{{{.sm = 80}, 80},
                                                                             {{.sm = 80}, 86},
                                                                             {{.sm = 86}, 89},
                                                                             {{.sm = 120}, 121},
                                                                             {{.sm = 87}, 87},
                                                                             {{.sm = 90, .suffix = 'a'}, 90}}) {
      CHECK(cubin_runs_on(target, sm));
    }
    for (const auto& [target, sm] : std::vector<std::pair<Target, unsigned>>{{{.sm = 86}, 80},
                                                                             {{.sm = 80}, 90},
                                                                             {{.sm = 87}, 89},
                                                                             {{.sm = 86}, 87},
                                                                             {{.sm = 100, .suffix = 'a'}, 103},
                                                                             {{.sm = 103}, 110}}) {
      CHECK_FALSE(cubin_runs_on(target, sm));
    }
  }

  TEST_CASE("for any GPU and any NVRTC the target runs there, and is never below sm_80") {
    std::mt19937 random(20);
    for (int round = 0; round < 2000; ++round) {
      std::vector<unsigned> targets;
      for (const unsigned sm : {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121, 130}) {
        if (random() % 2 == 0) targets.push_back(static_cast<unsigned>(sm));
      }
      const unsigned sm = 80 + random() % 60;
      try {
        const TargetChoice choice = choose_target(sm, targets);
        CHECK(choice.target.suffix == '\0');  // an 'a' target is for its own GPU alone
        CHECK(choice.target.sm >= 80);
        CHECK(choice.target.sm <= sm);
        CHECK(choice.needs_driver_jit == !cubin_runs_on(choice.target, sm));
      } catch (const UnsupportedDevice&) {
        for (const unsigned target : targets) CHECK((target < 80 || target > sm || target == 87 || target == 110));
      }
    }
  }

  TEST_CASE("no target at all, or a GPU that is too old, is refused with both sides named") {
    try {
      choose_target(86, std::vector<unsigned>{100, 120});
      FAIL("did not throw");
    } catch (const UnsupportedDevice& error) {
      const std::string text = error.what();
      CHECK(text.find("sm_100, sm_120") != std::string::npos);
      CHECK(text.find("8.6") != std::string::npos);
    }
    try {
      choose_target(75, kNvrtc13_0);
      FAIL("did not throw");
    } catch (const UnsupportedDevice& error) {
      CHECK(std::string(error.what()).find("7.5") != std::string::npos);
    }
  }

  TEST_CASE("names of targets, both ways") {
    for (const char* name : {"sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_120a", "sm_121"}) {
      CHECK(to_string(parse_target(name)) == name);
    }
    CHECK(parse_target("sm_90a") == Target{.sm = 90, .suffix = 'a'});
    for (const char* text :
         {"", "sm_", "sm_a", "90", "sm90", "compute_90", "SM_90", "sm_90b", "sm_90aa", "sm_90 ", " sm_90", "sm_-90",
          "sm_+90", "sm_090", "sm_9000", "sm_99999999999999999999", "sm_75", "sm_9"}) {
      CAPTURE(text);
      const std::string why = refusal(text);
      CHECK(why.find('"' + std::string(text) + '"') != std::string::npos);
      CHECK(why.find("sm_90a") != std::string::npos);  // says what would do
    }
  }

  TEST_CASE("typical devices: every target of 13.0, and nothing made up for others") {
    for (const unsigned sm : kNvrtc13_0) {
      if (sm < 80) continue;
      const DeviceInfo info = typical_device(sm);
      CHECK(info.sm() == sm);
      CHECK_FALSE(info.name.empty());
      CHECK(info.multiprocessors > 0);
      // CUDA programming guide: a block may have all of a multiprocessor's shared memory but 1 KiB.
      CHECK(info.smem_per_block_bytes + 1024 == info.smem_per_multiprocessor_bytes);
      CHECK(info.l2_bytes > 0);
    }
    CHECK(typical_device(80).smem_per_block_bytes == 166912);
    CHECK(typical_device(80).multiprocessors == 108);
    CHECK(typical_device(86).smem_per_block_bytes == 101376);
    CHECK(typical_device(90).smem_per_block_bytes == 232448);
    CHECK(typical_device(120).smem_per_block_bytes == 101376);
    for (const unsigned sm : {0u, 75u, 81u, 91u, 130u}) CHECK_THROWS_AS(typical_device(sm), UnsupportedDevice);
  }
}
