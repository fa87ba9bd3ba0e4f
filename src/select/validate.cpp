// SPDX-License-Identifier: Apache-2.0
// Every refusal of a problem or of tensors. check_in_order() and the functions above it hold the rules, one class
// of refusal after the other; plainly_valid() is only a fast way to see that none of them applies, for the launch.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <utility>

#include "qkvjit/device_context.h"
#include "qkvjit/error.h"
#include "qkvjit/qkv_problem.h"

namespace qkvjit {
namespace {

constexpr std::uint64_t kMaxExtent = 0xffffffffu;
constexpr std::uint64_t kGroupSize = 128;
constexpr std::uint64_t kPackedAlignment = 16;

enum class Role : std::uint8_t { activation, weight, scale, output };

struct Operand {
  const char* name;
  TensorView QkvTensors::*view;
  Role role;
  int matrix;  ///< 0 Q, 1 K, 2 V
};

constexpr std::array<Operand, 10> kOperands{{
    {"x", &QkvTensors::x, Role::activation, 0},
    {"w_q_packed", &QkvTensors::w_q_packed, Role::weight, 0},
    {"w_k_packed", &QkvTensors::w_k_packed, Role::weight, 1},
    {"w_v_packed", &QkvTensors::w_v_packed, Role::weight, 2},
    {"scales_q", &QkvTensors::scales_q, Role::scale, 0},
    {"scales_k", &QkvTensors::scales_k, Role::scale, 1},
    {"scales_v", &QkvTensors::scales_v, Role::scale, 2},
    {"q", &QkvTensors::q, Role::output, 0},
    {"k", &QkvTensors::k, Role::output, 1},
    {"v", &QkvTensors::v, Role::output, 2},
}};
constexpr std::size_t kFirstOutput = 7;

/// What the checks look at: `operands` leaves the outputs away where they are yet to be allocated.
struct Subject {
  const char* operation;
  const QkvTensors& tensors;
  std::span<const Operand> operands = kOperands;
};

template <typename E = InvalidProblem, typename... Args>
[[noreturn, gnu::noinline, gnu::cold]] void refuse(const char* operation, const char* field,
                                                   fmt::format_string<Args...> text, Args&&... args) {
  throw E(fmt::format("{}: {}: {}", operation, field, fmt::format(text, std::forward<Args>(args)...)));
}

std::uint64_t extent(const TensorView& t, int i) {
  return static_cast<std::uint64_t>(t.shape[static_cast<std::size_t>(i)]);
}

bool is_empty(const TensorView& t) {
  const int rank = std::clamp(t.rank, 0, static_cast<int>(kMaxRank));
  return std::any_of(t.shape.begin(), t.shape.begin() + rank, [](std::int64_t extent) { return extent == 0; });
}

// 1 to 4: what a tensor is, whatever the shapes should be.

void check_gradients(const Subject& s) {
  for (const Operand& o : s.operands) {
    if (o.role != Role::output && (s.tensors.*o.view).requires_grad) {
      refuse(s.operation, o.name,
             "got a tensor that requires grad, needs one that does not: the operation is forward-only; "
             "detach it, or run under no_grad");
    }
  }
}

const char* kind_in_words(MemoryKind kind) {
  switch (kind) {
    case MemoryKind::host:
      return "host memory";
    case MemoryKind::host_pinned:
      return "pinned host memory";
    case MemoryKind::managed:
      return "managed memory";
    case MemoryKind::cuda:
      break;
  }
  return "memory of an unknown kind";
}

using Facts = std::array<PointerFacts, kOperands.size()>;

/// `query` may be null; `facts` is filled where it is not.
void check_residence(const Subject& s, int ordinal, const PointerQuery* query, Facts& facts) {
  for (std::size_t i = 0; i < s.operands.size(); ++i) {
    const TensorView& t = s.tensors.*s.operands[i].view;
    const char* name = s.operands[i].name;
    if (t.device.kind != MemoryKind::cuda) {
      refuse(s.operation, name, "got {}, needs memory of CUDA device {}; copy it there (cuMemAlloc and cuMemcpyHtoD)",
             kind_in_words(t.device.kind), ordinal);
    }
    if (is_empty(t)) continue;  // no element, no address
    if (t.data == nullptr) {
      refuse(s.operation, name,
             "got a null pointer with the shape {}, needs memory of CUDA device {}; allocate it first", shape_text(t),
             ordinal);
    }
    if (query == nullptr) continue;
    facts[i] = (*query)(t.data);
    if (facts[i].kind != MemoryKind::cuda) {
      refuse(s.operation, name,
             "got the pointer {:#x}, which the CUDA driver calls {}, needs memory of CUDA device {}; copy it there "
             "(cuMemAlloc and cuMemcpyHtoD)",
             reinterpret_cast<std::uintptr_t>(t.data),
             facts[i].kind == MemoryKind::host ? "host memory or memory already freed" : kind_in_words(facts[i].kind),
             ordinal);
    }
  }
}

void check_ordinals(const Subject& s, int ordinal, bool queried, const Facts& facts) {
  for (std::size_t i = 0; i < s.operands.size(); ++i) {
    const TensorView& t = s.tensors.*s.operands[i].view;
    const char* name = s.operands[i].name;
    if (t.device.ordinal != ordinal) {
      refuse<DeviceMismatch>(s.operation, name,
                             "got a tensor of CUDA device {}, needs one of the context's device {}; copy it there, or "
                             "use a DeviceContext({})",
                             t.device.ordinal, ordinal, t.device.ordinal);
    }
    if (queried && !is_empty(t) && facts[i].ordinal != ordinal) {
      refuse<DeviceMismatch>(s.operation, name,
                             "got the pointer {:#x}, which the CUDA driver places on device {}, needs memory of the "
                             "context's device {}; copy it there, or use a DeviceContext({})",
                             reinterpret_cast<std::uintptr_t>(t.data), facts[i].ordinal, ordinal, facts[i].ordinal);
    }
  }
}

/// As PyTorch has it: the stride of an extent of 1 does not matter, and no stride of an empty tensor does.
bool is_contiguous(const TensorView& t) {
  if (t.shape[0] == 0 || t.shape[1] == 0) return true;
  return (t.shape[1] == 1 || t.strides[1] == 1) && (t.shape[0] == 1 || t.strides[0] == t.shape[1]);
}

void check_form(const Subject& s) {
  for (const Operand& o : s.operands) {
    const TensorView& t = s.tensors.*o.view;
    if (t.rank != 2) {
      refuse(s.operation, o.name,
             "got rank {} (shape {}), needs rank 2; give it as a matrix, with batch and sequence folded into the rows",
             t.rank, shape_text(t));
    }
    if (!is_contiguous(t)) {
      refuse(s.operation, o.name,
             "got strides [{}, {}] with the shape {}, needs a contiguous row-major tensor with strides [{}, 1]; {}",
             t.strides[0], t.strides[1], shape_text(t), t.shape[1],
             o.role == Role::output ? "give it memory of its own" : "make a contiguous copy");
    }
    if (t.offset_elements != 0) {
      refuse(s.operation, o.name,
             "got an offset of {} elements, needs 0; add it to the data pointer and set offset_elements to 0",
             t.offset_elements);
    }
  }
}

// 5 and 6: shapes.

int n_axis(Role role, WeightLayout layout) { return role == Role::weight && layout == WeightLayout::nk8 ? 0 : 1; }

std::uint64_t ceil_64(std::uint64_t extent) { return (extent + 63) / 64; }

/// Words along K and along N of a weight tensor.
std::uint64_t weight_k_extent(WeightLayout layout, std::uint64_t k) {
  return layout == WeightLayout::prepacked ? ceil_64(k) : k / 8;
}
std::uint64_t weight_n_extent(WeightLayout layout, std::uint64_t n) {
  return layout == WeightLayout::prepacked ? ceil_64(n) * kPackedBlockWords : n;
}

const char* shape_in_words(Role role, WeightLayout layout) {
  switch (role) {
    case Role::activation:
      return "[M, K]";
    case Role::weight:
      return layout == WeightLayout::nk8         ? "[N, K/8] (layout nk8)"
             : layout == WeightLayout::prepacked ? "[ceil(K/64), 512*ceil(N/64)] (layout prepacked)"
                                                 : "[K/8, N] (layout k8n)";
    case Role::scale:
      return "[K/128, N]";
    case Role::output:
      break;
  }
  return "[M, N]";
}

void check_negative(const Subject& s, WeightLayout layout) {
  for (const Operand& o : s.operands) {
    const TensorView& t = s.tensors.*o.view;
    if (t.shape[0] < 0 || t.shape[1] < 0) {
      refuse(s.operation, o.name, "got the shape {}, needs {} with no negative extent; mend the shape", shape_text(t),
             shape_in_words(o.role, layout));
    }
  }
}

void check_k(const Subject& s, WeightLayout layout) {
  const std::uint64_t k = extent(s.tensors.x, 1);
  if (k == 0) {
    refuse(s.operation, "x",
           "got K = 0 (shape {}), needs [M, K] with K a multiple of 128, at least 128; give x its columns",
           shape_text(s.tensors.x));
  }
  for (const Operand& o : s.operands) {
    if ((o.role == Role::weight || o.role == Role::scale) && extent(s.tensors.*o.view, n_axis(o.role, layout)) == 0) {
      refuse(s.operation, o.name,
             "got N = 0 (shape {}), needs {} with N at least 1; leave out a projection with no column",
             shape_text(s.tensors.*o.view), shape_in_words(o.role, layout));
    }
  }
  if (k % kGroupSize != 0) {
    refuse(s.operation, "x",
           "got K = {} (shape {}), needs K to be a multiple of 128; pad x and the weights with zeros to K = {}", k,
           shape_text(s.tensors.x), (k / kGroupSize + 1) * kGroupSize);
  }
}

/// A tensor's extent along K, for weights and scales.
void check_k_extents(const Subject& s, WeightLayout layout, Role role) {
  const std::uint64_t k = extent(s.tensors.x, 1);
  const std::uint64_t want = role == Role::weight ? weight_k_extent(layout, k) : k / kGroupSize;
  for (const Operand& o : s.operands) {
    if (o.role != role) continue;
    const TensorView& t = s.tensors.*o.view;
    const int axis = 1 - n_axis(role, layout);
    if (extent(t, axis) == want) continue;
    std::string fix;
    if (role == Role::scale) {
      fix = "give one row of scales for each group of 128 k";
    } else if (layout == WeightLayout::prepacked) {
      fix = "give the blocks that prepack() made (PackedWeights::view)";
    } else if (extent(t, 1 - axis) == want) {
      // KAIO documents one order and reads the other.
      fix = layout == WeightLayout::k8n
                ? "this is the shape of layout nk8 ([N, K/8], the order KAIO reads): pass WeightLayout::nk8, or "
                  "transpose the words"
                : "this is the shape of layout k8n ([K/8, N], GPTQ's order): pass WeightLayout::k8n, or transpose "
                  "the words";
    } else {
      fix = "pack 8 consecutive k into a word (qkvjit::pack)";
    }
    refuse(s.operation, o.name, "got the shape {}, needs {} with {} = {} (x has K = {}); {}", shape_text(t),
           shape_in_words(role, layout),
           role == Role::scale                 ? "K/128"
           : layout == WeightLayout::prepacked ? "ceil(K/64)"
                                               : "K/8",
           want, k, fix);
  }
}

void check_equal_n(const Subject& s, WeightLayout layout) {
  std::array<std::uint64_t, 6> n{};
  std::string list;
  for (std::size_t i = 0; i < n.size(); ++i) {
    const Operand& o = kOperands[i + 1];
    n[i] = extent(s.tensors.*o.view, n_axis(o.role, layout));
    list += fmt::format("{}{} {}", i > 0 ? ", " : "", o.name, n[i]);
  }
  if (std::any_of(n.begin(), n.end(), [&](std::uint64_t other) { return other != n[0]; })) {
    refuse(s.operation, "N",
           "got {}, needs six equal N; for projections of different widths (GQA, MQA) use a QkvPlan, whose QkvProblem "
           "has n_q, n_k and n_v",
           list);
  }
}

std::uint64_t n_of(const QkvProblem& p, int matrix) { return matrix == 0 ? p.n_q : matrix == 1 ? p.n_k : p.n_v; }

void check_output_shapes(const Subject& s, const QkvProblem& problem) {
  const std::uint64_t m = extent(s.tensors.x, 0);
  for (const Operand& o : s.operands) {
    const TensorView& t = s.tensors.*o.view;
    if (o.role != Role::output || (extent(t, 0) == m && extent(t, 1) == n_of(problem, o.matrix))) continue;
    refuse(s.operation, o.name, "got the shape {}, needs [M, N] = [{}, {}]; allocate the output with that shape",
           shape_text(t), m, n_of(problem, o.matrix));
  }
}

/// Weights or scales against the problem's N and K.
void check_role_shapes(const Subject& s, const QkvProblem& problem, Role role) {
  check_k_extents(s, problem.layout, role);
  for (const Operand& o : s.operands) {
    const std::uint64_t n = n_of(problem, o.matrix);
    const std::uint64_t want = role == Role::weight ? weight_n_extent(problem.layout, n) : n;
    if (o.role != role || extent(s.tensors.*o.view, n_axis(role, problem.layout)) == want) continue;
    refuse(s.operation, o.name, "got the shape {}, needs {} with N = {}; the plan is bound to that N, so bind another",
           shape_text(s.tensors.*o.view), shape_in_words(role, problem.layout), n);
  }
}

/// The general form: N and K are the problem's.
void check_shapes(const Subject& s, const QkvProblem& problem) {
  if (extent(s.tensors.x, 1) != problem.k) {
    refuse(s.operation, "x", "got the shape {}, needs [M, K] with K = {}; the plan is bound to that K, so bind another",
           shape_text(s.tensors.x), problem.k);
  }
  for (const Role role : {Role::weight, Role::scale}) check_role_shapes(s, problem, role);
  check_output_shapes(s, problem);
}

void check_extents(const Subject& s, WeightLayout layout) {
  const std::uint64_t m = extent(s.tensors.x, 0);
  const std::uint64_t n = extent(s.tensors.w_q_packed, n_axis(Role::weight, layout));
  const std::uint64_t k = extent(s.tensors.x, 1);
  if (m > kMaxExtent) {
    refuse(s.operation, "x", "got M = {}, needs at most {}; split the tokens over several calls", m, kMaxExtent);
  }
  if (n > kMaxExtent) {
    refuse(s.operation, "w_q_packed", "got N = {}, needs at most {}; split the columns over several calls", n,
           kMaxExtent);
  }
  if (k > kMaxExtent) {
    refuse(s.operation, "x", "got K = {}, needs at most {}; split K over several calls and add their results", k,
           kMaxExtent);
  }
}

// 7 and 8: dtype, alignment, overlap.

DType dtype_of(const QkvProblem& problem, Role role) {
  switch (role) {
    case Role::weight:
      return DType::u32;
    case Role::scale:
      return problem.scale_dtype;
    default:
      return problem.activation_dtype;
  }
}

void check_dtypes(const Subject& s, const QkvProblem& problem) {
  for (const Operand& o : s.operands) {
    const DType got = (s.tensors.*o.view).dtype;
    const DType want = dtype_of(problem, o.role);
    if (got == want) continue;
    const std::string fix = o.role == Role::weight   ? "give the packed words of 8 weights (qkvjit::pack) as they are"
                            : o.role == Role::output ? fmt::format("allocate it as {}", to_string(want))
                                                     : fmt::format("cast it with .to({})", to_string(want));
    refuse(s.operation, o.name, "got dtype {}, needs {}; {}", to_string(got), to_string(want), fix);
  }
}

/// Bytes that a base must be a multiple of.
std::uint64_t base_alignment(Role role, WeightLayout layout, DType dtype) {
  return role == Role::weight && layout == WeightLayout::prepacked ? kPackedAlignment : element_bytes(dtype);
}

void check_alignment(const Subject& s, WeightLayout layout) {
  for (const Operand& o : s.operands) {
    const TensorView& t = s.tensors.*o.view;
    const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(t.data);
    if (is_empty(t) || address % base_alignment(o.role, layout, t.dtype) == 0) continue;
    if (o.role == Role::weight && layout == WeightLayout::prepacked) {
      refuse(s.operation, o.name, "got the base {:#x}, needs a multiple of {} bytes; prepack into aligned memory",
             address, kPackedAlignment);
    }
    refuse(s.operation, o.name,
           "got the base {:#x}, needs a multiple of the element's {} bytes; copy it to aligned memory", address,
           element_bytes(t.dtype));
  }
}

struct Bytes {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

/// Contiguity was checked, so that a tensor's elements are all the bytes of its range.
Bytes bytes_of(const TensorView& t) {
  const std::uint64_t begin = reinterpret_cast<std::uintptr_t>(t.data);
  const std::uint64_t elements = extent(t, 0) * extent(t, 1);  // both below 2^32
  const std::uint64_t most = (~std::uint64_t{0} - begin) / element_bytes(t.dtype);
  return {begin, begin + std::min(elements, most) * element_bytes(t.dtype)};
}

void check_overlap(const Subject& s) {
  for (std::size_t i = kFirstOutput; i < s.operands.size(); ++i) {
    const Bytes output = bytes_of(s.tensors.*s.operands[i].view);
    for (std::size_t j = 0; j < i; ++j) {
      const Bytes other = bytes_of(s.tensors.*s.operands[j].view);
      if (std::max(output.begin, other.begin) >= std::min(output.end, other.end)) continue;
      refuse(
          s.operation, s.operands[i].name,
          "got the bytes [{:#x}, {:#x}), which overlap those of {}, [{:#x}, {:#x}), needs memory that no other tensor "
          "shares; give {} memory of its own",
          output.begin, output.end, s.operands[j].name, other.begin, other.end, s.operands[i].name);
    }
  }
}

void check_foreign_memory(const Subject& s, int ordinal, const Facts& facts) {
  for (std::size_t i = 0; i < s.operands.size(); ++i) {
    if (!facts[i].foreign_context) continue;
    refuse(s.operation, s.operands[i].name,
           "got memory at {:#x} of another context on CUDA device {}, needs memory of that device's primary context; "
           "allocate it while the primary context is current",
           reinterpret_cast<std::uintptr_t>((s.tensors.*s.operands[i].view).data), ordinal);
  }
}

// The problem.

bool is_supported(const QkvProblem& p) {
  const auto fits = [](std::uint64_t extent) { return extent - 1 < kMaxExtent; };
  return fits(p.n_q) && fits(p.n_k) && fits(p.n_v) && fits(p.k) && p.k % kGroupSize == 0 &&
         p.group_size == kGroupSize && p.activation_dtype == DType::f16 && p.scale_dtype == DType::f16 &&
         (p.layout == WeightLayout::k8n || p.layout == WeightLayout::nk8 || p.layout == WeightLayout::prepacked);
}

[[gnu::noinline, gnu::cold]] void check_problem(const QkvProblem& p) {
  const char* operation = "QkvProblem";
  const char* const names[] = {"n_q", "n_k", "n_v"};
  for (int i = 0; i < 3; ++i) {
    if (n_of(p, i) == 0) {
      refuse(operation, names[i],
             "got 0, needs at least 1; set it to the number of output columns (heads * head size)");
    }
  }
  if (p.k == 0) refuse(operation, "k", "got 0, needs a multiple of 128, at least 128; set it to the columns of x");
  if (p.k % kGroupSize != 0) {
    refuse(operation, "k",
           "got {}, needs a multiple of 128; the nearest that can be had is {}, with x and weights padded with zeros",
           p.k, p.k - p.k % kGroupSize + kGroupSize);
  }
  for (int i = 0; i < 3; ++i) {
    if (n_of(p, i) > kMaxExtent) {
      refuse(operation, names[i], "got {}, needs at most {}; split the columns over several plans", n_of(p, i),
             kMaxExtent);
    }
  }
  if (p.k > kMaxExtent) {
    refuse(operation, "k", "got {}, needs at most {}; split K over several plans and add their results", p.k,
           kMaxExtent);
  }
  if (p.group_size != kGroupSize) {
    const bool repeatable = p.group_size > kGroupSize && p.group_size % kGroupSize == 0;
    refuse(operation, "group_size", "got {}, needs 128; {}", p.group_size,
           repeatable
               ? fmt::format("the nearest that can be had is 128 with each row of scales repeated {} times, which "
                             "computes the same",
                             p.group_size / kGroupSize)
               : std::string("the nearest that can be had is 128: quantise the weights anew with it"));
  }
  if (p.activation_dtype != DType::f16) {
    refuse(operation, "activation_dtype",
           "got {}, needs f16; the nearest that can be had is x cast to f16 and f16 outputs",
           to_string(p.activation_dtype));
  }
  if (p.scale_dtype != DType::f16) {
    refuse(operation, "scale_dtype", "got {}, needs f16; the nearest that can be had is the scales cast to f16",
           to_string(p.scale_dtype));
  }
  if (p.layout != WeightLayout::k8n && p.layout != WeightLayout::nk8 && p.layout != WeightLayout::prepacked) {
    refuse(operation, "layout",
           "got the value {}, needs k8n ([K/8, N]), nk8 ([N, K/8]) or prepacked; name the order of the words",
           static_cast<unsigned>(p.layout));
  }
}

// The general form.

[[gnu::noinline, gnu::cold]] std::uint64_t check_in_order(const QkvProblem& problem, const QkvTensors& tensors,
                                                          int ordinal) {
  const Subject subject{.operation = "QkvPlan", .tensors = tensors};
  Facts facts;
  check_problem(problem);
  check_gradients(subject);
  check_residence(subject, ordinal, nullptr, facts);
  check_ordinals(subject, ordinal, false, facts);
  check_form(subject);
  check_negative(subject, problem.layout);
  check_shapes(subject, problem);
  check_extents(subject, problem.layout);
  check_dtypes(subject, problem);
  check_alignment(subject, problem.layout);
  check_overlap(subject);
  return extent(tensors.x, 0);
}

struct FastCheck {
  bool good;
  int ordinal;

  Bytes operator()(const TensorView& t, DType dtype, std::uint64_t rows, std::uint64_t columns) {
    const std::uint64_t begin = reinterpret_cast<std::uintptr_t>(t.data);
    const std::uint64_t bytes = element_bytes(dtype);
    good = good && t.device.kind == MemoryKind::cuda && t.device.ordinal == ordinal && t.rank == 2 &&
           extent(t, 0) == rows && extent(t, 1) == columns && static_cast<std::uint64_t>(t.strides[0]) == columns &&
           t.strides[1] == 1 && t.offset_elements == 0 && t.dtype == dtype && t.data != nullptr &&
           (begin & (bytes - 1)) == 0 && !t.requires_grad;
    return {begin, begin + rows * columns * bytes};
  }
};

/// True only where every check of check_in_order() passes. The converse does not hold: that is what it is there for.
bool plainly_valid(const QkvProblem& p, const QkvTensors& t, int ordinal) {
  const std::uint64_t m = extent(t.x, 0);
  // With the first clause, rows * columns * 4 stays far below 2^64 for each tensor.
  if (((m | p.n_q | p.n_k | p.n_v | p.k) >> 30) != 0 || m == 0 || !is_supported(p)) return false;
  const bool nk8 = p.layout == WeightLayout::nk8;
  FastCheck check{true, ordinal};
  const auto weight = [&](const TensorView& w, std::uint64_t n) {
    const std::uint64_t along_k = weight_k_extent(p.layout, p.k), along_n = weight_n_extent(p.layout, n);
    check.good &= reinterpret_cast<std::uintptr_t>(w.data) % base_alignment(Role::weight, p.layout, DType::u32) == 0;
    return check(w, DType::u32, nk8 ? along_n : along_k, nk8 ? along_k : along_n);
  };
  const std::uint64_t groups = p.k / kGroupSize;
  const Bytes bytes[] = {
      check(t.x, p.activation_dtype, m, p.k),
      weight(t.w_q_packed, p.n_q),
      weight(t.w_k_packed, p.n_k),
      weight(t.w_v_packed, p.n_v),
      check(t.scales_q, p.scale_dtype, groups, p.n_q),
      check(t.scales_k, p.scale_dtype, groups, p.n_k),
      check(t.scales_v, p.scale_dtype, groups, p.n_v),
      check(t.q, p.activation_dtype, m, p.n_q),
      check(t.k, p.activation_dtype, m, p.n_k),
      check(t.v, p.activation_dtype, m, p.n_v),
  };
  if (!check.good) return false;
  bool apart = true;
  for (std::size_t i = kFirstOutput; i < std::size(bytes); ++i) {
    for (std::size_t j = 0; j < i; ++j) apart &= (bytes[i].begin >= bytes[j].end) | (bytes[j].begin >= bytes[i].end);
  }
  return apart;
}

}  // namespace

void validate(const QkvProblem& problem) {
  if (!is_supported(problem)) check_problem(problem);
}

std::uint64_t validate(const QkvProblem& problem, const QkvTensors& tensors, int ordinal) {
  if (plainly_valid(problem, tensors, ordinal)) return extent(tensors.x, 0);
  return check_in_order(problem, tensors, ordinal);
}

void validate_weights(const char* operation, const QkvProblem& problem, const QkvTensors& tensors, int ordinal) {
  validate(problem);
  QkvTensors subject_tensors = tensors;
  // The checks read K from x, which this operation does not have.
  subject_tensors.x = TensorView::matrix(nullptr, problem.activation_dtype, 1, static_cast<std::int64_t>(problem.k));
  constexpr std::size_t kFirstWeight = 1, kWeights = 3;
  const Subject subject{operation, subject_tensors, std::span(kOperands).subspan(kFirstWeight, kWeights)};
  Facts facts;
  check_gradients(subject);
  check_residence(subject, ordinal, nullptr, facts);
  check_ordinals(subject, ordinal, false, facts);
  check_form(subject);
  check_negative(subject, problem.layout);
  check_role_shapes(subject, problem, Role::weight);
  check_dtypes(subject, problem);
  check_alignment(subject, problem.layout);
}

QkvProblem validate_qkv_project_int4(const QkvTensors& tensors, WeightLayout layout, const DeviceInfo& info,
                                     const PointerQuery& query, Outputs outputs) {
  const char* operation = "qkv_project_int4";
  Subject subject{.operation = operation, .tensors = tensors};
  if (outputs == Outputs::to_be_allocated) subject.operands = subject.operands.first(kFirstOutput);
  if (layout != WeightLayout::k8n && layout != WeightLayout::nk8) {
    refuse(operation, "layout", "got the value {}, needs k8n ([K/8, N]) or nk8 ([N, K/8]); name the order of the words",
           static_cast<unsigned>(layout));
  }
  Facts facts;
  check_gradients(subject);
  check_residence(subject, info.ordinal, query ? &query : nullptr, facts);
  check_ordinals(subject, info.ordinal, static_cast<bool>(query), facts);
  check_form(subject);
  check_negative(subject, layout);
  check_k(subject, layout);
  check_k_extents(subject, layout, Role::weight);
  check_k_extents(subject, layout, Role::scale);
  check_equal_n(subject, layout);

  QkvProblem problem;
  problem.n_q = problem.n_k = problem.n_v = extent(tensors.scales_q, 1);
  problem.k = extent(tensors.x, 1);
  problem.layout = layout;
  check_output_shapes(subject, problem);
  check_extents(subject, layout);
  check_dtypes(subject, problem);
  check_alignment(subject, problem.layout);
  check_overlap(subject);
  check_foreign_memory(subject, info.ordinal, facts);
  if (info.sm() < 80) {
    refuse<UnsupportedDevice>(operation, "device",
                              "got {} with compute capability {}.{}, needs 8.0 or newer (Ampere); use another GPU",
                              info.name, info.sm_major, info.sm_minor);
  }
  return problem;
}

}  // namespace qkvjit
