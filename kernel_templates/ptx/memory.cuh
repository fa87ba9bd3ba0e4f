// SPDX-License-Identifier: Apache-2.0
// Shared and global memory accesses, one PTX instruction a function. Shared addresses are 32-bit offsets in
// the shared window.
#pragma once

namespace qkvjit {

struct Vector4 {
  unsigned x, y, z, w;
};
struct Vector2 {
  unsigned x, y;
};

/// blockIdx.x, read anew at every call.
__device__ __forceinline__ unsigned block_index() {
  unsigned block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ Vector4 load_shared_16(unsigned address) {
  Vector4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ Vector2 load_shared_8(unsigned address) {
  Vector2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ unsigned load_shared_4(unsigned address) {
  unsigned v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

/// ldmatrix: four 8 × 8 matrices of 16-bit elements; lane l gives the address of row l%8 of matrix l/8, 16 bytes each,
/// and gets of each matrix the elements (l/4, 2*(l%4)) and the next.
__device__ __forceinline__ Vector4 load_matrices(unsigned address) {
  Vector4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_shared_16(unsigned address, Vector4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void store_shared_8(unsigned address, Vector2 v) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}

__device__ __forceinline__ void store_shared_4(unsigned address, unsigned v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

/// Of memory that nobody writes while the kernel runs.
__device__ __forceinline__ Vector2 load_global_8(const void* pointer) {
  Vector2 v;
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(pointer));
  return v;
}

__device__ __forceinline__ void store_global_4(void* pointer, unsigned v) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(pointer), "r"(v) : "memory");
}

__device__ __forceinline__ void store_global_8(void* pointer, Vector2 v) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(pointer), "r"(v.x), "r"(v.y) : "memory");
}

__device__ __forceinline__ void store_global_16(void* pointer, Vector4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

/// cp.async: 16 bytes that bypass L1 (weights are read once). `bytes` below 16 fills the rest with zeros; 0 reads
/// nothing.
__device__ __forceinline__ void copy_async_16_stream(unsigned destination, const void* source, unsigned bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

/// As above, 16 bytes through L1 (activations are read by every block).
__device__ __forceinline__ void copy_async_16(unsigned destination, const void* source, unsigned bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_async_8(unsigned destination, const void* source, unsigned bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_async_4(unsigned destination, const void* source, unsigned bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most kPending of this thread's newest groups are unfinished.
template <unsigned kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace qkvjit
