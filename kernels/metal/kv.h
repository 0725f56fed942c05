// What the Metal kernels of packed KV share: the decode rule for one lane, halves, the inverse rotation of a row by one simdgroup.
#ifndef TQ_METAL_KV_H
#define TQ_METAL_KV_H

#define TQ_FN METAL_FUNC
#define TQ_AS_FLOAT(bits) as_type<float>(bits)
#include "common/kv_decode.h"

#ifndef TQ_UNROLL  // CUDA says it in another way
#define TQ_UNROLL _Pragma("clang loop unroll(full)")
#endif

#define TQ_LARGEST_HALF 65504.0f
#define TQ_SMALLEST_HALF 5.9604644775390625e-8f  // 2^-24

// A product that is rounded before anything is added to it.
#ifndef TQ_PRODUCT  // CUDA says it in another way
#define TQ_PRODUCT(a, b) tq_product(a, b)
METAL_FUNC float tq_product(float a, float b) {
#pragma clang fp contract(off)
  const float product = a * b;
  return product;
}
#endif

// Where no token has been seen: finite, so that differences of it are numbers.
#define TQ_KV_NOTHING -1.0e30f

METAL_FUNC TqEight tq_kv_load(const device uint32_t *part, uint32_t run, uint32_t bits) {
  const uint32_t word = tq_kv_word(run, bits);
  return tq_kv_eight(part[word], part[word + 1], tq_kv_shift(run, bits));
}

METAL_FUNC float tq_low_half(uint32_t word) { return float(as_type<half2>(word).x); }
METAL_FUNC float tq_high_half(uint32_t word) { return float(as_type<half2>(word).y); }

// y = H y, element 32 i + lane in y[i]: butterflies between lanes, then between registers. Every lane of the simdgroup must come here.
template <int N>
METAL_FUNC void tq_kv_hadamard(uint32_t lane, thread float (&y)[N]) {
  TQ_UNROLL for (uint32_t step = 1; step < 32; step *= 2) {
    TQ_UNROLL for (int i = 0; i < N; ++i) {
      const float other = simd_shuffle_xor(y[i], step);
      y[i] = (lane & step) == 0 ? y[i] + other : other - y[i];
    }
  }
  TQ_UNROLL for (int step = 1; step < N; step *= 2) {
    TQ_UNROLL for (int i = 0; i < N; ++i) {
      if ((i & step) == 0) {
        const float first = y[i], second = y[i + step];
        y[i] = first + second;
        y[i + step] = first - second;
      }
    }
  }
}

#endif
