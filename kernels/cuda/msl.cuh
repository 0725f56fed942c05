// The part of Metal's language that the kernels in metal/ use, for CUDA. Their text follows, without the address spaces that CUDA has no
// words for (tqtool/kernels/cuda.py strikes them out). Thread blocks have one dimension, simdgroups are warps.
#define METAL_FUNC __device__ __forceinline__
#define TQ_UNROLL _Pragma("unroll")
#define threadgroup __shared__
#define TQ_PRODUCT(a, b) __fmul_rn(a, b)

template <class To, class From> METAL_FUNC To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

namespace metal {
METAL_FUNC float fma(float a, float b, float c) { return fmaf(a, b, c); }
METAL_FUNC float rint(float x) { return rintf(x); }
namespace precise {
METAL_FUNC float exp(float x) { return expf(x); }
METAL_FUNC float exp2(float x) { return exp2f(x); }
METAL_FUNC float sqrt(float x) { return sqrtf(x); }
}  // namespace precise
}  // namespace metal

enum class mem_flags { mem_threadgroup };
METAL_FUNC void threadgroup_barrier(mem_flags) { __syncthreads(); }
METAL_FUNC float simd_shuffle_xor(float value, int mask) { return __shfl_xor_sync(~0u, value, mask); }
METAL_FUNC float simd_sum(float value) {
  TQ_UNROLL for (int step = 16; step > 0; step /= 2) value += simd_shuffle_xor(value, step);
  return value;
}

METAL_FUNC float simd_min(float value) {
  TQ_UNROLL for (int step = 16; step > 0; step /= 2) value = fminf(value, simd_shuffle_xor(value, step));
  return value;
}

METAL_FUNC uint3 tq_position() { return {blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y, blockIdx.z}; }
#define thread_position_in_grid tq_position()
#define threadgroup_position_in_grid blockIdx
#define thread_index_in_threadgroup threadIdx.x
#define thread_index_in_simdgroup (threadIdx.x % 32)
#define simdgroup_index_in_threadgroup (threadIdx.x / 32)
