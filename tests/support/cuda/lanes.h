// What a CUDA kernel sees when g++ compiles it: its words, and a fibre for each thread. A thread runs until it comes to a barrier or an exchange with its warp; who
// comes last lets all go on. Threads take their turns first to last or last to first: a barrier that is missing shows in one of the two orders if what it keeps apart
// changes a result. The rest is compute-sanitizer's business, on a card.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
struct uint3 {
  uint32_t x, y, z;
};
struct __half {
  _Float16 value;
  __half() = default;
  explicit __half(float from) : value((_Float16)from) {}
  operator float() const { return (float)value; }
};
typedef __half half;
struct half2 {
  __half x, y;
};
struct __nv_bfloat16 {};
static inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
// Of the shared header, not of the encoders.
static inline float __half2float(__half) { abort(); }
static inline float __bfloat162float(__nv_bfloat16) { abort(); }
static inline __half __float2half_rn(float) { abort(); }
static inline __nv_bfloat16 __float2bfloat16_rn(float) { abort(); }
static inline float __uint_as_float(uint32_t) { abort(); }
static inline float __fmul_rn(float a, float b) { return a * b; }
using std::max;
using std::min;
template <class T> static inline T __ldg(const T *from) { return *from; }
template <class T> static inline T __ldcg(const T *from) { return *from; }
template <class T> static inline void __stcg(T *to, T value) { *to = value; }
static inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = (uint64_t)b << 32 | a;
  uint32_t found = 0;
  for (int i = 0; i < 4; i++) found |= (uint32_t)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return found;
}

namespace lanes {
static int count, running, arrived, generation;
static ucontext_t scheduler;
static std::vector<ucontext_t> contexts;
static std::vector<char> ended;
static struct Warp {
  uint64_t value[32];
  int arrived, generation;
} warps[32];
struct Running {
  operator int() const { return running; }
};
static void wait() {
  const int self = running;
  swapcontext(&contexts[self], &scheduler);
  running = self;
}
static void meet(int &arrived, int &generation, int all) {
  const int before = generation;
  if (++arrived == all) arrived = 0, generation++;
  while (before == generation) wait();
}
}  // namespace lanes
static struct {
  lanes::Running x;
} threadIdx;
static struct {
  uint32_t x, y, z;
} blockIdx, gridDim, blockDim;
static inline void __syncthreads() { lanes::meet(lanes::arrived, lanes::generation, lanes::count); }
template <class T> static inline T __shfl_xor_sync(uint32_t, T value, int mask) {
  lanes::Warp &warp = lanes::warps[lanes::running / 32];
  const int lane = lanes::running % 32;
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  warp.value[lane] = bits;
  lanes::meet(warp.arrived, warp.generation, 32);
  T other;
  memcpy(&other, &warp.value[lane ^ mask], sizeof other);
  lanes::meet(warp.arrived, warp.generation, 32);
  return other;
}

void kernel();  // generated
namespace lanes {
alignas(16) static unsigned char shared[227 << 10];
static void enter(int thread) {
  running = thread;
  kernel();
  ended[thread] = 1;
  for (;;) wait();
}
static void launch(int columns, int lines, int threads, bool backwards) {
  std::vector<std::vector<char>> stacks(threads, std::vector<char>(1 << 17));
  gridDim = {(uint32_t)columns, (uint32_t)lines, 1}, blockDim = {(uint32_t)threads, 1, 1}, count = threads;
  for (int block = 0; block < columns * lines; block++) {
    blockIdx = {(uint32_t)(block % columns), (uint32_t)(block / columns), 0};
    memset(shared, 0xA5, sizeof shared);
    contexts.assign(threads, ucontext_t());
    ended.assign(threads, 0);
    for (int thread = 0; thread < threads; thread++) {
      getcontext(&contexts[thread]);
      contexts[thread].uc_stack.ss_sp = stacks[thread].data(), contexts[thread].uc_stack.ss_size = stacks[thread].size();
      makecontext(&contexts[thread], (void (*)())enter, 1, thread);
    }
    for (int left = threads; left;) {
      left = 0;
      for (int turn = 0; turn < threads; turn++) {
        const int thread = backwards ? threads - 1 - turn : turn;
        if (!ended[thread]) running = thread, swapcontext(&scheduler, &contexts[thread]), left++;
      }
    }
  }
}
static void *read(size_t bytes) {
  void *to = malloc(bytes);
  if (fread(to, 1, bytes, stdin) != bytes) abort();
  return to;
}
static void *filled(size_t bytes) { return memset(malloc(bytes), 0xA5, bytes); }
}  // namespace lanes
