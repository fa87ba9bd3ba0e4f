// SPDX-License-Identifier: Apache-2.0
#include "bench_cublas.h"

#include <dlfcn.h>

#include "qkvjit/error.h"

namespace qkvbench {

namespace {

constexpr int kF16 = 2, kF32 = 0, kCompute32F = 68;  // CUDA_R_16F, CUDA_R_32F, CUBLAS_COMPUTE_32F
constexpr int kMaxWorkspace = 1;                     // CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
constexpr std::size_t kWorkspaceBytes = std::size_t{64} << 20;
constexpr int kAlgorithms = 6;

/// cublasLtMatmulHeuristicResult_t
struct Heuristic {
  std::uint64_t algorithm[8];
  std::size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};

}  // namespace

struct CublasLt::Impl {
  void* handle = nullptr;
  int (*create)(void**) = nullptr;
  int (*destroy)(void*) = nullptr;
  int (*desc_create)(void**, int, int) = nullptr;
  int (*layout_create)(void**, int, std::uint64_t, std::uint64_t, std::int64_t) = nullptr;
  int (*preference_create)(void**) = nullptr;
  int (*preference_set)(void*, int, const void*, std::size_t) = nullptr;
  int (*heuristic)(void*, void*, void*, void*, void*, void*, void*, int, Heuristic*, int*) = nullptr;
  int (*matmul)(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*,
                void*, void*, const void*, void*, std::size_t, CUstream) = nullptr;

  template <typename F>
  static bool load(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    return function != nullptr;
  }
};

CublasLt::CublasLt() {
  void* library = nullptr;
  for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12", "/usr/local/cuda/lib64/libcublasLt.so"}) {
    if ((library = dlopen(name, RTLD_NOW)) != nullptr) break;
  }
  if (library == nullptr) return;
  auto impl = std::make_unique<Impl>();
  const bool complete = Impl::load(library, "cublasLtCreate", impl->create) &&
                        Impl::load(library, "cublasLtDestroy", impl->destroy) &&
                        Impl::load(library, "cublasLtMatmulDescCreate", impl->desc_create) &&
                        Impl::load(library, "cublasLtMatrixLayoutCreate", impl->layout_create) &&
                        Impl::load(library, "cublasLtMatmulPreferenceCreate", impl->preference_create) &&
                        Impl::load(library, "cublasLtMatmulPreferenceSetAttribute", impl->preference_set) &&
                        Impl::load(library, "cublasLtMatmulAlgoGetHeuristic", impl->heuristic) &&
                        Impl::load(library, "cublasLtMatmul", impl->matmul);
  if (complete && impl->create(&impl->handle) == 0) impl_ = std::move(impl);
}

CublasLt::~CublasLt() {
  if (impl_ != nullptr) impl_->destroy(impl_->handle);
}

bool CublasLt::available() const noexcept { return impl_ != nullptr; }

std::vector<CublasLt::Gemm> CublasLt::candidates(std::uint64_t m, std::uint64_t n, std::uint64_t k) const {
  // Column-major, as cuBLAS sees it: out^T [n, m] = w^T [n, k] * x^T [k, m].
  Impl& lt = *impl_;
  const auto need = [](int status) {
    if (status != 0) throw qkvjit::Error("cuBLASLt: a descriptor cannot be made");
  };
  void *desc = nullptr, *a = nullptr, *b = nullptr, *c = nullptr, *preference = nullptr;
  need(lt.desc_create(&desc, kCompute32F, kF32));
  need(lt.layout_create(&a, kF16, n, k, static_cast<std::int64_t>(n)));
  need(lt.layout_create(&b, kF16, k, m, static_cast<std::int64_t>(k)));
  need(lt.layout_create(&c, kF16, n, m, static_cast<std::int64_t>(n)));
  need(lt.preference_create(&preference));
  need(lt.preference_set(preference, kMaxWorkspace, &kWorkspaceBytes, sizeof(kWorkspaceBytes)));
  std::array<Heuristic, kAlgorithms> results{};
  int found = 0;
  if (lt.heuristic(lt.handle, desc, a, b, c, c, preference, kAlgorithms, results.data(), &found) != 0) found = 0;
  std::vector<Gemm> gemms;
  for (int i = 0; i < found; ++i) {
    if (results[static_cast<std::size_t>(i)].state != 0) continue;
    gemms.emplace_back([=, &lt, result = results[static_cast<std::size_t>(i)]](const void* w, const void* x, void* out,
                                                                               void* workspace, CUstream stream) {
      const float one = 1.f, zero = 0.f;
      if (lt.matmul(lt.handle, desc, &one, w, a, x, b, &zero, out, c, out, c, result.algorithm, workspace,
                    kWorkspaceBytes, stream) != 0) {
        throw qkvjit::Error("cublasLtMatmul failed");
      }
    });
  }
  return gemms;  // the descriptors live as long as the process: a few bytes a row
}

}  // namespace qkvbench
