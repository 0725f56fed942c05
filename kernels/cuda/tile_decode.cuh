// What the tile kernels put before the tensor cores and take from them: hashes of a lane's states, inputs in fixed point, sums beyond 32 bits.
#include "cuda/device.cuh"

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
template <> struct TqWord<16> { using type = uint4; };
template <> struct TqWord<8> { using type = uint2; };

// Input e of those that lie in words one after another.
static __device__ __forceinline__ float tq_input(const uint32_t *words, int e, float) { return __uint_as_float(words[e]); }
static __device__ __forceinline__ float tq_input(const uint32_t *words, int e, __nv_bfloat16) { return __uint_as_float(e & 1 ? words[e >> 1] & 0xFFFF0000u : words[e >> 1] << 16); }
static __device__ __forceinline__ float tq_input(const uint32_t *words, int e, __half) {
  __half value;
  const uint16_t bits = (uint16_t)(words[e >> 1] >> (e & 1 ? 16 : 0));
  memcpy(&value, &bits, 2);
  return __half2float(value);
}

// Four neighbouring inputs, as they lie in memory.
template <class T> struct TqFour {
  uint32_t words[sizeof(T)];
  // x[i .. i+3] of n, both multiples of 4, x aligned to four inputs; zeros from n on.
  __device__ __forceinline__ void load(const T *x, int i, int n) {
    using Word = typename TqWord<4 * sizeof(T)>::type;
    Word word{};
    if (i < n) word = __ldg(reinterpret_cast<const Word *>(x + i));
    memcpy(words, &word, sizeof word);
  }
  __device__ __forceinline__ float operator[](int e) const { return tq_input(words, e, T{}); }
};

template <class T> static __device__ __forceinline__ T tq_cast(float v);
template <> __device__ __forceinline__ float tq_cast<float>(float v) { return v; }
template <> __device__ __forceinline__ __half tq_cast<__half>(float v) { return __float2half_rn(v); }
template <> __device__ __forceinline__ __nv_bfloat16 tq_cast<__nv_bfloat16>(float v) { return __float2bfloat16_rn(v); }

// Lane's 32 K bits of one tile: word i at w[i]; w[K] is the word after them.
template <int K> struct TqLane {
  uint32_t w[K + 1];
};

template <int K> static __device__ __forceinline__ void tq_load(TqLane<K> &lane, const uint32_t *p, const uint32_t *after) {
  if constexpr (K == 4) {
    const uint4 v = tq_ldg(reinterpret_cast<const uint4 *>(p));
    lane.w[0] = v.x, lane.w[1] = v.y, lane.w[2] = v.z, lane.w[3] = v.w;
  } else if constexpr (K == 2) {
    const uint2 v = tq_ldg(reinterpret_cast<const uint2 *>(p));
    lane.w[0] = v.x, lane.w[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < K; i++) lane.w[i] = tq_ldg(p + i);
  }
  lane.w[K] = tq_ldg(after);
}

// The state whose window begins `bit` bits into the lane's words. Within a word it is two shifts, the left one on the multiplier's pipe: both
// integer pipes are then about equally busy, which shift and mask are not (3 % of the whole on an H200).
template <int K, int L> static __device__ __forceinline__ uint32_t tq_window(const TqLane<K> &lane, int bit) {
  const int word = bit >> 5, shift = bit & 31;
  const uint32_t mask = (1u << L) - 1u, low = lane.w[word];
  if (shift + L > 32) return __funnelshift_r(low, lane.w[word + 1], shift) & mask;
  if (shift + L == 32) return low >> shift;
  return shift == 0 ? low & mask : tq_mul(low, 1u << (32 - L - shift)) >> (32 - L);
}

template <int K, int L, int CODE> static __device__ __forceinline__ uint32_t tq_hash(const TqLane<K> &lane, int step) {
  const uint32_t state = tq_window<K, L>(lane, (31 - step) * K);
  return CODE == TQ_CODE_MUL1 ? tq_hash_mul1(state) : tq_hash_1mad(state);
}

// A sum of 32-bit sums, in two halves: shared memory adds 32 bits at once, 64 only by trial.
struct TqSum {
  int low, high;
  __device__ __forceinline__ void add(int part) {
    atomicAdd(&low, part & 0xFFFF);
    atomicAdd(&high, part >> 16);
  }
  __device__ __forceinline__ long long value() const { return (long long)high * 65536 + low; }
};

// Fixed point of LIMBS signed bytes, each from -128 to 127. Three: a power of two times x, so that what float16 and bfloat16 hold within fifteen bits of the
// largest |x| (given by its bits) is exact; the largest becomes more than 2^22 and at most 0x7F7F7F. One: the largest becomes 127. Below 2^-100 the step
// stays that of 2^-100; if something is not finite the result is NaN.
static __device__ __forceinline__ uint32_t tq_fixed_exponent(uint32_t largest) {
  const uint32_t held = max(largest, 0x0D800000u);  // 2^-100
  return 276u - (held >> 23) - ((held & 0x7FFFFFu) > 0x7EFEFEu);
}
template <int LIMBS> static __device__ __forceinline__ float tq_to_fixed(uint32_t largest) {
  if (largest >= 0x7F800000u) return 0.f;
  return LIMBS == 1 ? 127.f / fmaxf(__uint_as_float(largest), 0x1p-100f) : __uint_as_float(tq_fixed_exponent(largest) << 23);
}
template <int LIMBS> static __device__ __forceinline__ float tq_from_fixed(uint32_t largest) {
  if (largest >= 0x7F800000u) return __uint_as_float(0x7FC00000u);
  return LIMBS == 1 ? fmaxf(__uint_as_float(largest), 0x1p-100f) / 127.f : __uint_as_float((254u - tq_fixed_exponent(largest)) << 23);
}

// The signed bytes whose sum of limb l * 256^l is q, as bytes 0 .. LIMBS-1.
template <int LIMBS> static __device__ __forceinline__ uint32_t tq_limbs(int q) {
  constexpr uint32_t HALVES = LIMBS == 1 ? 0 : 0x808080;
  return ((uint32_t)q + HALVES) ^ HALVES;
}
