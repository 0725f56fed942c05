// What CUDA kernels have in common: names for the hardware's instructions, and types.
#define TQ_FN static __device__ __forceinline__
#define TQ_WORDS const uint32_t *
#include "common/trellis_decode.h"

template <class V> static __device__ __forceinline__ V tq_ldg(const V *p) { return __ldg(p); }

// A multiplication that the compiler does not turn back into a shift.
static __device__ __forceinline__ uint32_t tq_mul(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint32_t product;
  asm("mul.lo.u32 %0,%1,%2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
#else
  return a * b;
#endif
}

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

// c += a b: a is 16 x 32 unsigned bytes, b 32 x 8 signed ones. What has no tensor cores says TQ_IMMA.
static __device__ __forceinline__ void tq_imma(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
#ifdef TQ_IMMA
  TQ_IMMA(c, a0, a1, a2, a3, b0, b1);
#else
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

template <int BYTES> struct TqWord;
template <> struct TqWord<16> { using type = float4; };
template <> struct TqWord<8> { using type = uint2; };
static __device__ __forceinline__ float tq_float(float v) { return v; }
static __device__ __forceinline__ float tq_float(__half v) { return __half2float(v); }
static __device__ __forceinline__ float tq_float(__nv_bfloat16 v) { return __bfloat162float(v); }

// Four neighbouring inputs, as they lie in memory.
template <class T> struct TqFour {
  T value[4];
  // x[i .. i+3] of n, both multiples of 4, x aligned to four inputs; zeros from n on.
  __device__ __forceinline__ void load(const T *x, int i, int n) {
    using Word = typename TqWord<4 * sizeof(T)>::type;
    Word word{};
    if (i < n) word = __ldg(reinterpret_cast<const Word *>(x + i));
    memcpy(value, &word, sizeof word);
  }
  __device__ __forceinline__ float operator[](int e) const { return tq_float(value[e]); }
};

template <class T> static __device__ __forceinline__ T tq_cast(float v);
template <> __device__ __forceinline__ float tq_cast<float>(float v) { return v; }
template <> __device__ __forceinline__ __half tq_cast<__half>(float v) { return __float2half_rn(v); }
template <> __device__ __forceinline__ __nv_bfloat16 tq_cast<__nv_bfloat16>(float v) { return __float2bfloat16_rn(v); }
