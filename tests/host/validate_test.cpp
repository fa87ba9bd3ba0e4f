// SPDX-License-Identifier: Apache-2.0
// Every refusal, at every tensor, with what its text must say; and that an earlier class of refusal wins over a later.
#include <doctest/doctest.h>

#include <array>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "qkvjit/device_context.h"
#include "qkvjit/error.h"
#include "qkvjit/qkv_problem.h"

namespace {

using namespace qkvjit;

constexpr std::array<const char*, 10> kNames{"x",        "w_q_packed", "w_k_packed", "w_v_packed", "scales_q",
                                             "scales_k", "scales_v",   "q",          "k",          "v"};
constexpr int kOrdinal = 2;

/// Everything a call is given. Addresses are made up: nothing here is ever read.
struct Call {
  QkvTensors tensors;
  WeightLayout layout = WeightLayout::k8n;
  DeviceInfo info;
  std::map<const void*, PointerFacts> facts;  // what the driver says; cuda on kOrdinal where absent

  TensorView& at(int i) {
    TensorView* const views[] = {&tensors.x,        &tensors.w_q_packed, &tensors.w_k_packed, &tensors.w_v_packed,
                                 &tensors.scales_q, &tensors.scales_k,   &tensors.scales_v,   &tensors.q,
                                 &tensors.k,        &tensors.v};
    return *views[i];
  }
  PointerFacts& fact(int i) {
    return facts.try_emplace(at(i).data, PointerFacts{MemoryKind::cuda, kOrdinal, false}).first->second;
  }
  QkvProblem run(Outputs outputs = Outputs::given) {
    const auto query = [this](const void* pointer) {
      const auto found = facts.find(pointer);
      return found == facts.end() ? PointerFacts{MemoryKind::cuda, kOrdinal, false} : found->second;
    };
    return validate_qkv_project_int4(tensors, layout, info, query, outputs);
  }
};

void* address(std::uint64_t value) { return reinterpret_cast<void*>(value); }

void resize(TensorView& view, std::int64_t rows, std::int64_t columns) {
  view.shape[0] = rows;
  view.shape[1] = columns;
  view.strides[0] = columns;
  view.strides[1] = 1;
}

Call make_call(std::int64_t m, std::array<std::int64_t, 3> n, std::int64_t k, WeightLayout layout) {
  Call call;
  call.layout = layout;
  call.info = {.ordinal = kOrdinal, .name = "NVIDIA Imaginary", .sm_major = 8, .sm_minor = 0};
  const bool nk8 = layout == WeightLayout::nk8;
  for (int i = 0; i < 10; ++i) {
    TensorView& t = call.at(i);
    t.data = address(0x7f0000000000u + static_cast<std::uint64_t>(i) * 0x1000000000u);
    t.dtype = i >= 1 && i <= 3 ? DType::u32 : DType::f16;
    t.device.ordinal = kOrdinal;
    const std::int64_t columns = n[static_cast<std::size_t>((i + 2) % 3)];
    if (i == 0) resize(t, m, k);
    if (i >= 1 && i <= 3) resize(t, nk8 ? columns : k / 8, nk8 ? k / 8 : columns);
    if (i >= 4 && i <= 6) resize(t, k / 128, columns);
    if (i >= 7) resize(t, m, columns);
  }
  return call;
}

Call good_call(WeightLayout layout = WeightLayout::k8n) { return make_call(5, {96, 96, 96}, 384, layout); }
QkvProblem good_problem(WeightLayout layout = WeightLayout::k8n) {
  return {.n_q = 96, .n_k = 96, .n_v = 96, .k = 384, .layout = layout};
}

enum class Kind { none, invalid, mismatch, unsupported, other };

struct Outcome {
  Kind kind = Kind::none;
  std::string text;
};

Outcome outcome_of(const std::function<void()>& call) {
  try {
    call();
    return {};
  } catch (const InvalidProblem& error) {
    return {Kind::invalid, error.what()};
  } catch (const DeviceMismatch& error) {
    return {Kind::mismatch, error.what()};
  } catch (const UnsupportedDevice& error) {
    return {Kind::unsupported, error.what()};
  } catch (const std::exception& error) {
    return {Kind::other, error.what()};
  }
}

struct Fault {
  int order;  ///< the class of refusal; 8 alignment, 9 overlap, 10 foreign memory are one class of three steps
  std::function<void(Call&)> apply;
  std::vector<std::string> words;  ///< all in the text; the first is "<tensor>: "
  Kind kind = Kind::invalid;
  bool empties = false;  ///< leaves an empty tensor, whose address and strides do not matter
  bool strict_only = false;
};

void check_outcome(const Outcome& outcome, const Fault& fault, const char* operation) {
  CAPTURE(outcome.text);
  CAPTURE(fault.words[0]);
  CHECK(static_cast<int>(outcome.kind) == static_cast<int>(fault.kind));
  CHECK(outcome.text.rfind(std::string(operation) + ": " + fault.words[0], 0) == 0);
  for (const std::string& word : fault.words) {
    CAPTURE(word);
    CHECK(outcome.text.find(word) != std::string::npos);
  }
}

std::vector<Fault> all_faults(WeightLayout layout) {
  const bool nk8 = layout == WeightLayout::nk8;
  const int n_axis = nk8 ? 0 : 1;
  std::vector<Fault> faults;
  for (int i = 0; i < 10; ++i) {
    const std::string name = std::string(kNames[static_cast<std::size_t>(i)]) + ": ";
    const auto on = [i](auto change) { return [i, change](Call& call) { change(call.at(i)); }; };
    const auto add = [&](int order, std::function<void(Call&)> apply, std::vector<std::string> words,
                         Kind kind = Kind::invalid, bool strict_only = false) {
      words.insert(words.begin(), name);
      faults.push_back({order, std::move(apply), std::move(words), kind, false, strict_only});
    };
    if (i < 7) add(1, on([](TensorView& t) { t.requires_grad = true; }), {"requires grad", "forward-only", "detach"});

    const std::pair<MemoryKind, const char*> kinds[] = {{MemoryKind::host, "host memory"},
                                                        {MemoryKind::host_pinned, "pinned host memory"},
                                                        {MemoryKind::managed, "managed memory"}};
    for (const auto& [kind, words] : kinds) {
      add(2, on([kind = kind](TensorView& t) { t.device.kind = kind; }),
          {std::string("got ") + words, "needs memory of CUDA device 2", "copy it there"});
      add(
          2, [i, kind = kind](Call& call) { call.fact(i).kind = kind; },
          {"driver calls", words, "needs memory of CUDA device 2", "copy it there"}, Kind::invalid, true);
    }
    add(2, on([](TensorView& t) { t.data = nullptr; }), {"null pointer", "with the shape [", "allocate"});

    add(3, on([](TensorView& t) { t.device.ordinal = 1; }), {"CUDA device 1", "device 2", "DeviceContext(1)"},
        Kind::mismatch);
    add(
        3, [i](Call& call) { call.fact(i).ordinal = 0; }, {"device 0", "device 2", "DeviceContext(0)"}, Kind::mismatch,
        true);

    add(4, on([](TensorView& t) {
          t.rank = 3;
          t.shape[2] = 2;
        }),
        {"got rank 3", "needs rank 2", "fold"});
    add(4, on([](TensorView& t) { t.rank = 1; }), {"got rank 1", "needs rank 2"});
    add(4, on([](TensorView& t) { t.strides = {12345, 1}; }), {"strides [12345, 1]", "contiguous", "copy"});
    if (i >= 7) faults.back().words.back() = "memory of its own";
    add(4, on([](TensorView& t) { t.strides = {1, 4321}; }), {"strides [1, 4321]", "contiguous"});
    add(4, on([](TensorView& t) { t.strides = {t.shape[1], 2}; }), {", 2] with the shape", "contiguous"});
    add(4, on([](TensorView& t) { t.offset_elements = 24; }), {"offset of 24 elements", "needs 0", "data pointer"});

    add(5, on([](TensorView& t) { resize(t, -1, t.shape[1]); }), {"[-1, ", "negative"});
    if (i == 0) {
      add(5, on([](TensorView& t) { resize(t, t.shape[0], 0); }), {"K = 0", "multiple of 128"});
      faults.back().empties = true;
      faults.back().strict_only = true;
      add(5, on([](TensorView& t) { resize(t, t.shape[0], 380); }), {"got K = 380", "multiple of 128", "K = 384"});
      faults.back().strict_only = true;
    }
    if (i >= 1 && i <= 6) {
      const int axis = i <= 3 ? n_axis : 1;
      add(5, on([axis](TensorView& t) { resize(t, axis == 0 ? 0 : t.shape[0], axis == 1 ? 0 : t.shape[1]); }),
          {"N = 0", "at least 1"});
      faults.back().empties = true;
      faults.back().strict_only = true;
      add(5, on([axis](TensorView& t) { resize(t, t.shape[0] + (1 - axis), t.shape[1] + axis); }), {});
      faults.back().words = {"N: ", std::string(kNames[static_cast<std::size_t>(i)]) + " 97", "six equal N", "QkvPlan"};
      for (int other = 1; other <= 6; ++other) {
        if (other != i) faults.back().words.push_back(std::string(kNames[static_cast<std::size_t>(other)]) + " 96");
      }
      faults.back().strict_only = true;
      add(5, on([axis](TensorView& t) { resize(t, t.shape[0] + axis, t.shape[1] + (1 - axis)); }),
          {i <= 3 ? "K/8 = 48" : "K/128 = 3", "x has K = 384", i <= 3 ? "pack" : "one row of scales"});
      if (i <= 3) {  // the other layout's shape
        add(5, on([](TensorView& t) { resize(t, t.shape[1], t.shape[0]); }),
            {nk8 ? "[48, 96]" : "[96, 48]", nk8 ? "WeightLayout::k8n" : "WeightLayout::nk8", "transpose",
             nk8 ? "(layout nk8)" : "(layout k8n)"});
      }
    }
    if (i >= 7) {
      add(5, on([](TensorView& t) { resize(t, t.shape[0] + 1, t.shape[1]); }), {"needs [M, N] = [", "allocate"});
      add(5, on([](TensorView& t) { resize(t, t.shape[0], t.shape[1] + 1); }), {"needs [M, N] = [", "allocate"});
    }

    for (const DType dtype : {DType::f16, DType::bf16, DType::f32, DType::u32}) {
      const DType want = i >= 1 && i <= 3 ? DType::u32 : DType::f16;
      if (dtype == want) continue;
      add(7, on([dtype](TensorView& t) { t.dtype = dtype; }),
          {std::string("got dtype ") + to_string(dtype) + ", needs " + to_string(want) + "; ",
           i == 0 || (i >= 4 && i <= 6) ? "cast it with"
           : i <= 3                     ? "pack"
                                        : "allocate it as f16"});
    }
    add(8, on([](TensorView& t) { t.data = address(reinterpret_cast<std::uint64_t>(t.data) + 1); }),
        {"0x", "multiple of the element's", "aligned"});
    if (i >= 7) {
      for (int other = 0; other < i; ++other) {
        add(9,
            [i, other](Call& call) {  // the last element of the one is the first of the other
              const TensorView& t = call.at(other);
              const std::uint64_t bytes = static_cast<std::uint64_t>(t.shape[0] * t.shape[1]) * element_bytes(t.dtype);
              call.at(i).data = address(reinterpret_cast<std::uint64_t>(t.data) + bytes - element_bytes(t.dtype));
            },
            {std::string("overlap those of ") + kNames[static_cast<std::size_t>(other)] + ",", "memory of its own"});
      }
    }
    add(
        10, [i](Call& call) { call.fact(i).foreign_context = true; },
        {"another context", "CUDA device 2", "primary context"}, Kind::invalid, true);
  }
  faults.push_back({6,
                    [](Call& call) {
                      const std::int64_t m = std::int64_t{1} << 32;
                      for (const int i : {0, 7, 8, 9}) resize(call.at(i), m, call.at(i).shape[1]);
                    },
                    {"x: ", "M = 4294967296", "at most 4294967295", "split"}});
  faults.push_back({6,
                    [n_axis](Call& call) {
                      const std::int64_t n = (std::int64_t{1} << 32) + 8;
                      for (int i = 1; i < 10; ++i) {
                        const bool rows = i <= 3 && n_axis == 0;
                        resize(call.at(i), rows ? n : call.at(i).shape[0], rows ? call.at(i).shape[1] : n);
                      }
                    },
                    {"w_q_packed: ", "N = 4294967304", "at most 4294967295", "split"},
                    Kind::invalid,
                    false,
                    true});
  faults.push_back({6,
                    [n_axis](Call& call) {
                      const std::int64_t k = std::int64_t{1} << 40;
                      resize(call.at(0), call.at(0).shape[0], k);
                      for (int i = 1; i <= 6; ++i) {
                        const std::int64_t along = i <= 3 ? k / 8 : k / 128;
                        const bool columns = i <= 3 && n_axis == 0;
                        resize(call.at(i), columns ? call.at(i).shape[0] : along,
                               columns ? along : call.at(i).shape[1]);
                      }
                    },
                    {"x: ", "K = 1099511627776", "at most 4294967295", "split"},
                    Kind::invalid,
                    false,
                    true});
  faults.push_back({11,
                    [](Call& call) {
                      call.info.sm_major = 7;
                      call.info.sm_minor = 5;
                    },
                    {"device: ", "NVIDIA Imaginary", "7.5", "8.0"},
                    Kind::unsupported,
                    false,
                    true});
  return faults;
}

}  // namespace

TEST_SUITE("validate") {
  TEST_CASE("strict: a good call of each layout gives its problem") {
    for (const WeightLayout layout : {WeightLayout::k8n, WeightLayout::nk8}) {
      CHECK(good_call(layout).run() == good_problem(layout));
    }
  }

  TEST_CASE("strict: every refusal at every tensor names operation, tensor, got, needs and fix") {
    for (const WeightLayout layout : {WeightLayout::k8n, WeightLayout::nk8}) {
      const std::vector<Fault> faults = all_faults(layout);
      REQUIRE(faults.size() > 200);
      for (const Fault& fault : faults) {
        Call call = good_call(layout);
        fault.apply(call);
        check_outcome(outcome_of([&] { call.run(); }), fault, "qkv_project_int4");
      }
    }
  }

  TEST_CASE("strict: an earlier class of refusal wins over a later one, whatever tensors they are at") {
    const std::vector<Fault> faults = all_faults(WeightLayout::k8n);
    std::size_t pairs = 0;
    for (const Fault& early : faults) {
      for (const Fault& late : faults) {
        if (early.order >= late.order || (late.empties && early.order <= 4)) continue;
        // The later one first: `early` then changes what is there, and surely holds at the end.
        Call call = good_call();
        late.apply(call);
        early.apply(call);
        // A list of all six N, or a size that was made huge, is not what it is alone; the class and tensor are.
        Fault expected = early;
        expected.words.resize(1);
        const Outcome outcome = outcome_of([&] { call.run(); });
        const bool same =
            outcome.kind == early.kind && outcome.text.rfind("qkv_project_int4: " + early.words[0], 0) == 0;
        if (!same) check_outcome(outcome, expected, "qkv_project_int4");
        // Not the later one's text: the words that tell what was got differ between classes.
        const bool told = outcome.text.find(late.words[1]) != std::string::npos &&
                          outcome.text.rfind("qkv_project_int4: " + late.words[0], 0) == 0 &&
                          outcome.text.find(early.words[1]) == std::string::npos && early.order != 5;
        CHECK_MESSAGE(!told, "order " << early.order << " lost to " << late.order << ": " << outcome.text);
        ++pairs;
      }
    }
    CHECK(pairs > 20000);
  }

  TEST_CASE("general: the same refusals, and widths of their own") {
    for (const WeightLayout layout : {WeightLayout::k8n, WeightLayout::nk8}) {
      for (const Fault& fault : all_faults(layout)) {
        if (fault.strict_only) continue;
        Call call = good_call(layout);
        fault.apply(call);
        check_outcome(outcome_of([&] { validate(good_problem(layout), call.tensors, kOrdinal); }), fault, "QkvPlan");
      }
      Call call = make_call(3, {96, 16, 1}, 256, layout);
      const QkvProblem problem{.n_q = 96, .n_k = 16, .n_v = 1, .k = 256, .layout = layout};
      CHECK(validate(problem, call.tensors, kOrdinal) == 3);
      const Outcome strict = outcome_of([&] { call.run(); });
      CHECK(strict.text.find("w_q_packed 96, w_k_packed 16, w_v_packed 1, scales_q 96, scales_k 16, scales_v 1") !=
            std::string::npos);

      QkvProblem other = problem;
      other.n_k = 17;
      const Outcome n = outcome_of([&] { validate(other, call.tensors, kOrdinal); });
      CHECK(n.text.rfind("QkvPlan: w_k_packed: ", 0) == 0);
      CHECK(n.text.find("N = 17") != std::string::npos);
      other = problem;
      other.k = 384;
      const Outcome k = outcome_of([&] { validate(other, call.tensors, kOrdinal); });
      CHECK(k.text.rfind("QkvPlan: x: ", 0) == 0);
      CHECK(k.text.find("K = 384") != std::string::npos);
    }
  }

  TEST_CASE("the message of the documentation, word for word") {
    Call call = good_call();
    call.tensors.scales_k.dtype = DType::f32;
    CHECK(outcome_of([&] { call.run(); }).text ==
          "qkv_project_int4: scales_k: got dtype f32, needs f16; cast it with .to(f16)");
  }

  TEST_CASE("M = 0 passes with null pointers, and only with shapes that fit") {
    for (const WeightLayout layout : {WeightLayout::k8n, WeightLayout::nk8}) {
      Call call = make_call(0, {7, 7, 7}, 128, layout);
      for (const int i : {0, 7, 8, 9}) call.at(i).data = nullptr;
      CHECK(call.run().n_q == 7);
      CHECK(validate({.n_q = 7, .n_k = 7, .n_v = 7, .k = 128, .layout = layout}, call.tensors, kOrdinal) == 0);
      call.tensors.v.shape[1] = 8;
      CHECK(outcome_of([&] { call.run(); }).text.find("v: got the shape [0, 8]") != std::string::npos);
      call = make_call(0, {7, 7, 7}, 128, layout);
      call.tensors.scales_v.data = nullptr;  // not empty
      CHECK(outcome_of([&] { call.run(); }).text.find("scales_v: got a null pointer") != std::string::npos);
      // An empty output inside another tensor overlaps nothing.
      call = make_call(0, {7, 7, 7}, 128, layout);
      call.tensors.q.data = address(reinterpret_cast<std::uint64_t>(call.tensors.scales_q.data) + 2);
      CHECK_NOTHROW(call.run());
    }
  }

  TEST_CASE("strides of an extent of 1 do not matter; a stride over 1 column does") {
    Call row = make_call(1, {40, 40, 40}, 128, WeightLayout::k8n);
    row.tensors.x.strides[0] = 99999;
    row.tensors.scales_k.strides[0] = 0;
    row.tensors.v.strides[0] = -5;
    CHECK_NOTHROW(row.run());
    CHECK(validate({.n_q = 40, .n_k = 40, .n_v = 40, .k = 128}, row.tensors, kOrdinal) == 1);

    Call column = make_call(6, {1, 1, 1}, 256, WeightLayout::k8n);
    column.tensors.q.strides[1] = 17;
    CHECK_NOTHROW(column.run());
    column.tensors.q.strides[0] = 3;  // one column of a [6, 3] tensor
    CHECK(outcome_of([&] { column.run(); }).text.find("strides [3, 17]") != std::string::npos);
  }

  TEST_CASE("column slices of one merged tensor: one row is contiguous and apart; more are refused for their strides") {
    for (const std::int64_t m : {std::int64_t{1}, std::int64_t{2}}) {
      Call call = make_call(m, {64, 64, 64}, 128, WeightLayout::k8n);
      for (int i = 7; i < 10; ++i) {
        call.at(i).data = address(0x5000000000u + static_cast<std::uint64_t>(i - 7) * 64 * 2);
        call.at(i).strides = {192, 1};
      }
      const Outcome outcome = outcome_of([&] { call.run(); });
      if (m == 1) {
        CHECK_MESSAGE(outcome.kind == Kind::none, outcome.text);
      } else {
        CHECK(outcome.text.find("q: got strides [192, 1]") != std::string::npos);
        CHECK(outcome.text.find("overlap") == std::string::npos);
      }
    }
  }

  TEST_CASE("tensors that touch are apart; shared inputs are fine") {
    Call call = good_call();
    const std::uint64_t base = 0x600000000000u;
    std::uint64_t next = base;
    for (int i = 9; i >= 0; --i) {  // every output directly before the next tensor
      call.at(i).data = address(next);
      next += static_cast<std::uint64_t>(call.at(i).shape[0] * call.at(i).shape[1]) * element_bytes(call.at(i).dtype);
    }
    CHECK_NOTHROW(call.run());
    CHECK(validate(good_problem(), call.tensors, kOrdinal) == 5);
    call.tensors.w_k_packed.data = call.tensors.w_v_packed.data;
    call.tensors.scales_k.data = call.tensors.scales_v.data;
    CHECK_NOTHROW(call.run());
    CHECK(validate(good_problem(), call.tensors, kOrdinal) == 5);
  }

  TEST_CASE("64-bit products: M*K and M*N over 2^32 bytes and over 2^62 elements neither wrap nor overlap falsely") {
    const std::int64_t most = 0xffffffff;
    Call call = make_call(most, {40000, 40000, 40000}, 16384, WeightLayout::k8n);
    const std::uint64_t x_bytes = static_cast<std::uint64_t>(most) * 16384 * 2;
    call.tensors.x.data = address(0x10000);
    const std::uint64_t n_bytes = static_cast<std::uint64_t>(most) * 40000 * 2;
    for (int i = 7; i < 10; ++i) {
      call.at(i).data = address(0x1000000000000000u + static_cast<std::uint64_t>(i) * (n_bytes + 2));
    }
    CHECK_NOTHROW(call.run());
    call.tensors.k.data = address(0x10000 + x_bytes - 2);
    CHECK(outcome_of([&] { call.run(); }).text.find("k: got the bytes") != std::string::npos);
    // Extents at their limits: the byte range saturates instead of wrapping to a small one.
    Call huge = make_call(most, {1, 1, 1}, 0x80000080, WeightLayout::k8n);
    huge.tensors.x.data = address(0x10000);
    CHECK(outcome_of([&] { huge.run(); }).text.find("q: got the bytes") != std::string::npos);
  }

  TEST_CASE("ranks that no tensor has are refused, not read") {
    for (const int rank : {-1, 0, 9, 1000}) {
      Call call = good_call();
      call.tensors.w_v_packed.rank = rank;
      const Outcome outcome = outcome_of([&] { call.run(); });
      CHECK(outcome.text.find("w_v_packed: got rank " + std::to_string(rank)) != std::string::npos);
      CHECK(outcome_of([&] { validate(good_problem(), call.tensors, kOrdinal); }).kind == Kind::invalid);
    }
  }

  TEST_CASE("without a query only the caller's word is checked; a query sees each non-empty tensor's base") {
    Call call = good_call();
    CHECK_NOTHROW(validate_qkv_project_int4(call.tensors, call.layout, call.info, {}));
    std::vector<const void*> asked;
    validate_qkv_project_int4(call.tensors, call.layout, call.info, [&](const void* pointer) {
      asked.push_back(pointer);
      return PointerFacts{MemoryKind::cuda, kOrdinal, false};
    });
    REQUIRE(asked.size() == 10);
    for (int i = 0; i < 10; ++i) CHECK(asked[static_cast<std::size_t>(i)] == call.at(i).data);
  }

  TEST_CASE("outputs yet to be allocated are not looked at; every input still is") {
    const std::vector<Fault> faults = all_faults(WeightLayout::k8n);
    std::size_t of_outputs = 0;
    for (const Fault& fault : faults) {
      const std::string& name = fault.words[0];
      const bool output = name == "q: " || name == "k: " || name == "v: ";
      Call call = good_call();
      fault.apply(call);
      for (int i = 7; !output && i < 10; ++i) call.at(i) = {};
      const Outcome outcome = outcome_of([&] { call.run(Outputs::to_be_allocated); });
      if (output) {
        CHECK_MESSAGE(outcome.kind == Kind::none, outcome.text);
        ++of_outputs;
      } else {
        check_outcome(outcome, fault, "qkv_project_int4");
      }
    }
    CHECK(of_outputs > 50);
  }

  TEST_CASE("problems no kernel does are refused with the nearest thing that can be had") {
    struct Bad {
      std::function<void(QkvProblem&)> change;
      std::vector<std::string> words;
    };
    const std::vector<Bad> bads{
        {[](QkvProblem& p) { p.n_q = 0; }, {"n_q: got 0", "at least 1", "heads"}},
        {[](QkvProblem& p) { p.n_k = 0; }, {"n_k: got 0", "at least 1"}},
        {[](QkvProblem& p) { p.n_v = 0; }, {"n_v: got 0", "at least 1"}},
        {[](QkvProblem& p) { p.k = 0; }, {"k: got 0", "multiple of 128"}},
        {[](QkvProblem& p) { p.k = 160; }, {"k: got 160", "multiple of 128", "256"}},
        {[](QkvProblem& p) { p.n_v = 1ull << 32; }, {"n_v: got 4294967296", "4294967295"}},
        {[](QkvProblem& p) { p.k = 1ull << 32; }, {"k: got 4294967296", "4294967295"}},
        {[](QkvProblem& p) { p.group_size = 64; }, {"group_size: got 64", "needs 128", "anew"}},
        {[](QkvProblem& p) { p.group_size = 0; }, {"group_size: got 0", "needs 128"}},
        {[](QkvProblem& p) { p.group_size = 256; }, {"group_size: got 256", "needs 128", "repeated 2 times"}},
        {[](QkvProblem& p) { p.activation_dtype = DType::bf16; }, {"activation_dtype: got bf16", "needs f16", "cast"}},
        {[](QkvProblem& p) { p.scale_dtype = DType::f32; }, {"scale_dtype: got f32", "needs f16", "cast"}},
        {[](QkvProblem& p) { p.layout = static_cast<WeightLayout>(9); }, {"layout: got the value 9", "k8n", "nk8"}},
    };
    const Call call = good_call();
    for (const Bad& bad : bads) {
      QkvProblem problem = good_problem();
      bad.change(problem);
      for (const Outcome& outcome :
           {outcome_of([&] { validate(problem); }), outcome_of([&] { validate(problem, call.tensors, kOrdinal); })}) {
        CAPTURE(outcome.text);
        CHECK(outcome.kind == Kind::invalid);
        CHECK(outcome.text.rfind("QkvProblem: " + bad.words[0], 0) == 0);
        for (const std::string& word : bad.words) CHECK(outcome.text.find(word) != std::string::npos);
      }
    }
    CHECK_NOTHROW(validate(good_problem(WeightLayout::nk8)));
    CHECK_NOTHROW(validate({.n_q = 0xffffffff, .n_k = 1, .n_v = 8, .k = 0xffffff80}));
    Call call_with_layout = good_call();
    call_with_layout.layout = static_cast<WeightLayout>(7);
    CHECK(outcome_of([&] { call_with_layout.run(); }).text.find("layout: got the value 7") != std::string::npos);
  }

  TEST_CASE("random: valid problems pass both forms; one wrong field is always seen") {
    std::mt19937_64 random(20240611);
    const auto below = [&](std::uint64_t limit) { return static_cast<std::int64_t>(random() % limit); };
    for (int round = 0; round < 3000; ++round) {
      const WeightLayout layout = below(2) != 0 ? WeightLayout::k8n : WeightLayout::nk8;
      const bool equal = below(2) != 0;
      std::array<std::int64_t, 3> n{1 + below(5000), 1 + below(5000), 1 + below(5000)};
      if (equal) n = {n[0], n[0], n[0]};
      Call call = make_call(below(70), n, 128 * (1 + below(90)), layout);
      const QkvProblem problem{.n_q = static_cast<std::uint64_t>(n[0]),
                               .n_k = static_cast<std::uint64_t>(n[1]),
                               .n_v = static_cast<std::uint64_t>(n[2]),
                               .k = static_cast<std::uint64_t>(call.tensors.x.shape[1]),
                               .layout = layout};
      REQUIRE_NOTHROW(validate(problem));
      REQUIRE(validate(problem, call.tensors, kOrdinal) == static_cast<std::uint64_t>(call.tensors.x.shape[0]));
      if (n[0] == n[1] && n[1] == n[2]) REQUIRE(call.run() == problem);

      // The extents of all packed words, each in each place.
      Call misplaced = call;
      const std::int64_t words = call.tensors.x.shape[1] / 8;
      for (int combination = 0; combination < 4; ++combination) {
        for (int i = 1; i <= 3; ++i) {
          const std::int64_t extents[] = {n[static_cast<std::size_t>(i - 1)], words};
          resize(misplaced.at(i), extents[combination / 2], extents[combination % 2]);
        }
        const bool right = combination == (layout == WeightLayout::nk8 ? 1 : 2);
        const bool same = n[0] == words || n[1] == words || n[2] == words;
        const Outcome outcome = outcome_of([&] { validate(problem, misplaced.tensors, kOrdinal); });
        if (!same) REQUIRE((outcome.kind == Kind::none) == right);
      }

      // One extent, with strides that fit it, so that only the shape is wrong.
      const int which = static_cast<int>(below(10));
      TensorView& t = call.at(which);
      const std::int64_t delta = below(2) != 0 ? 1 : -1;
      const bool rows = below(2) != 0;
      resize(t, t.shape[0] + (rows ? delta : 0), t.shape[1] + (rows ? 0 : delta));
      CAPTURE(std::string(kNames[static_cast<std::size_t>(which)]));  // not an address
      REQUIRE(outcome_of([&] { validate(problem, call.tensors, kOrdinal); }).kind == Kind::invalid);
      REQUIRE(outcome_of([&] { call.run(); }).kind == Kind::invalid);
    }
  }

  TEST_CASE("names and shapes for messages") {
    CHECK(std::string(to_string(DType::bf16)) == "bf16");
    CHECK(std::string(to_string(MemoryKind::host_pinned)) == "host_pinned");
    TensorView view = TensorView::matrix(nullptr, DType::f32, 4, 4096);
    CHECK(shape_text(view) == "[4, 4096]");
    view.rank = 0;
    CHECK(shape_text(view) == "[]");
    view.rank = 8;
    CHECK(shape_text(view) == "[4, 4096, 0, 0, 0, 0, 0, 0]");
  }
}
