// SPDX-License-Identifier: Apache-2.0
// Streams `vectors` 16-byte vectors from memory, each read once: the read bandwidth that qkvjit-bench compares with.
extern "C" __global__ void __launch_bounds__(512)
    bench_read(const uint4* data, unsigned long long vectors, unsigned* sink) {
  const unsigned long long stride = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
  unsigned sum = 0;
  unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 7 * stride < vectors; i += 8 * stride) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w)
                   : "l"(data + i + j * stride));
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (sum == 0x12345678u) *sink = sum;  // never with random data, but the reads cannot be left out
}
