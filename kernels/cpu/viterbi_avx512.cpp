// Viterbi steps with AVX-512: 16 suffixes per vector.
#include <immintrin.h>

#include "cpu/viterbi.h"

namespace {
struct Avx512 {
  using reg = __m512;
  using cost = float;
  static constexpr int width = 16;
  static reg set1(float v) { return _mm512_set1_ps(v); }
  static reg load(const float *p) { return _mm512_load_ps(p); }
  static reg level(const float *p) { return load(p); }
  static void store(float *p, reg v) { _mm512_store_ps(p, v); }
  static reg sub(reg a, reg b) { return _mm512_sub_ps(a, b); }
  static reg fma(reg a, reg b, reg c) { return _mm512_fmadd_ps(a, b, c); }
  // Costs are never negative, so their bit patterns order like integers.
  static reg min(reg a, reg b) { return _mm512_castsi512_ps(_mm512_min_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b))); }
  static float lowest(reg v) { return _mm512_reduce_min_ps(v); }
  // Lane i gets p[i >> K]: 2^K neighbouring suffixes share a predecessor.
  template <int K> static reg spread(const float *p) {
    if constexpr (K >= 4) return _mm512_set1_ps(*p);
    if constexpr (K == 3) {
      return _mm512_mask_broadcastss_ps(_mm512_set1_ps(p[0]), 0xff00, _mm_load_ss(p + 1));
    }
    if constexpr (K == 2) {
      const reg four = _mm512_broadcast_f32x4(_mm_loadu_ps(p));
      return _mm512_permutevar_ps(four, _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3));
    }
    const reg eight = _mm512_broadcast_f32x8(_mm256_loadu_ps(p));
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), eight);
  }
};
#include "cpu/viterbi.inl"
}  // namespace

tq::EncodeBlock tq::encode_block_avx512(int bits, int window) { return pick<Avx512>(bits, window); }
