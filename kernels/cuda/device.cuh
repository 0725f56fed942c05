// What CUDA kernels have in common: names for the hardware's instructions, and types.
#define TQ_FN static __device__ __forceinline__
#define TQ_WORDS const uint32_t *
#include "common/trellis_decode.h"

// a b + c, which the compiler does not take apart to put sums of several together anew.
static __device__ __forceinline__ uint32_t tq_mul_add(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDA_ARCH__)
  uint32_t sum;
  asm("mad.lo.u32 %0,%1,%2,%3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
#else
  return a * b + c;
#endif
}

// The low (high) half of a register as a signed number; `never` is 0, but no compiler may know it that must not work all halves out beforehand.
static __device__ __forceinline__ uint32_t tq_half(uint32_t pair, bool high, uint32_t never) {
#if defined(__CUDA_ARCH__)
  uint32_t half;
  asm("prmt.b32 %0,%1,0,%2;" : "=r"(half) : "r"(pair), "r"((high ? 0xBB32u : 0x9910u) | never));
  return half;
#else
  return (uint32_t)(int32_t)(int16_t)((high ? pair >> 16 : pair) | never);
#endif
}

// min(a + b, c), one instruction from compute capability 9.0 on.
static __device__ __forceinline__ uint32_t tq_add_min(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return __viaddmin_u32(a, b, c);
#else
  return min(a + b, c);
#endif
}

// Sixteen bytes from device to shared memory on their own, past the first cache; and waiting for all that this thread asked for.
static __device__ __forceinline__ void tq_ask(uint4 *to, const void *from) {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.cg.shared.global [%0],[%1],16;" : : "r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from) : "memory");
#else
  *to = *static_cast<const uint4 *>(from);
#endif
}
static __device__ __forceinline__ void tq_arrived() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.wait_all;" : : : "memory");
#endif
}
