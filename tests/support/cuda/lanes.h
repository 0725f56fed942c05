// What a CUDA kernel sees when g++ compiles it: its words, and a fibre for each thread. A thread runs until it comes to a barrier or an exchange with its warp; who
// comes last lets all go on. Threads take their turns first to last or last to first: a barrier that is missing shows in one of the two orders if what it keeps apart
// changes a result. The rest is compute-sanitizer's business, on a card.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <numeric>
#include <utility>
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
struct __nv_bfloat16 {  // as it lies in memory
  uint16_t bits;
};
static inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
static inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  return memcpy(&bits, &value, 4), bits;
}
static inline float __uint_as_float(uint32_t bits) {
  float value;
  return memcpy(&value, &bits, 4), value;
}
static inline float __half2float(__half value) { return value; }
static inline __half __float2half_rn(float value) { return __half(value); }
static inline float __bfloat162float(__nv_bfloat16 value) { return __uint_as_float((uint32_t)value.bits << 16); }
static inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  const uint32_t bits = __float_as_uint(value);
  return {(uint16_t)(value != value ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}
static inline int __float2int_rn(float value) { return (int)lrintf(value); }
static inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, int by) { return (uint32_t)(((uint64_t)high << 32 | low) >> (by & 31)); }
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
template <class T> static inline T __shfl_sync(uint32_t, T value, int source) {
  lanes::Warp &warp = lanes::warps[lanes::running / 32];
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  warp.value[lanes::running % 32] = bits;
  lanes::meet(warp.arrived, warp.generation, 32);
  T other;
  memcpy(&other, &warp.value[source & 31], sizeof other);
  lanes::meet(warp.arrived, warp.generation, 32);
  return other;
}
template <class T> static inline T __shfl_xor_sync(uint32_t all, T value, int mask) { return __shfl_sync(all, value, (lanes::running % 32) ^ mask); }
// What every lane of the warp says, to what each of them has to say about it.
template <class T, class Tell> static inline auto warp_wide(T value, Tell tell) {
  static T said[32][32];
  const int warp = lanes::running / 32, lane = lanes::running % 32;
  lanes::Warp &meeting = lanes::warps[warp];
  said[warp][lane] = value;
  lanes::meet(meeting.arrived, meeting.generation, 32);
  const auto answer = tell(said[warp], lane);
  lanes::meet(meeting.arrived, meeting.generation, 32);
  return answer;
}
static inline uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
  return warp_wide(value, [](const uint32_t *said, int) { return *std::max_element(said, said + 32); });
}
static inline int __reduce_add_sync(uint32_t, int value) {
  return warp_wide(value, [](const int *said, int) { return std::accumulate(said, said + 32, 0); });
}
// One thread runs at a time: an addition in memory is one.
template <class T> static inline T atomicAdd(T *to, T value) { return std::exchange(*to, (T)(*to + value)); }
template <class T> static inline T atomicMax(T *to, T value) { return std::exchange(*to, std::max(*to, value)); }

// c += a b, mma.m16n8k32 of u8 and s8. Lane l has a: rows l/4 and l/4 + 8, k from 4 (l%4) and 16 further; b: the same k, column l/4; c: those rows, columns
// 2 (l%4) and the next (PTX ISA, "Matrix Fragments for mma.m16n8k32").
struct Operands {
  uint32_t a[4], b[2];
};
static inline void lanes_imma(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  struct Sums {
    int c[4];
  };
  const Sums sums = warp_wide(Operands{{a0, a1, a2, a3}, {b0, b1}}, [](const Operands *said, int lane) {
    Sums sums = {};
    for (int j = 0; j < 4; j++)
      for (int k = 0; k < 32; k++) {
        const uint32_t a = said[lane / 4 * 4 + k % 16 / 4].a[(j >> 1) + k / 16 * 2], b = said[(2 * (lane % 4) + j % 2) * 4 + k % 16 / 4].b[k / 16];
        sums.c[j] += (int)(a >> 8 * (k % 4) & 255) * (int)(int8_t)(b >> 8 * (k % 4) & 255);
      }
    return sums;
  });
  for (int j = 0; j < 4; j++) c[j] += sums.c[j];
}
#define TQ_IMMA lanes_imma

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
// Ends where memory ends: what is read or written behind it is a fault, not luck.
static void *guarded(size_t bytes) {
  const size_t page = 4096, room = (bytes + page - 1) / page * page;
  char *from = (char *)mmap(nullptr, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (from == MAP_FAILED || mprotect(from + room, page, PROT_NONE)) abort();
  return from + room - (bytes + 15) / 16 * 16;
}
static void *read(size_t bytes) {
  void *to = guarded(bytes);
  if (fread(to, 1, bytes, stdin) != bytes) abort();
  return to;
}
static void *filled(size_t bytes) { return memset(guarded(bytes), 0xA5, bytes); }
}  // namespace lanes
