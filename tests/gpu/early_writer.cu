// SPDX-License-Identifier: Apache-2.0
// The worst neighbour that a dependent launch can have: it lets its dependents start at once, dawdles, and only then
// writes what they read. Compiled by NVRTC inside the GPU tests.
extern "C" __global__ void early_writer(unsigned* to, const unsigned* from, unsigned long long words,
                                        unsigned delay_ns) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < delay_ns);
  for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x)
    to[i] = from[i];
}
