// Viterbi steps with AVX2 and FMA: 8 suffixes per vector.
#include <immintrin.h>

#include "cpu/viterbi.h"

namespace {
struct Avx2 {
  using reg = __m256;
  using cost = float;
  static constexpr int width = 8;
  static reg set1(float v) { return _mm256_set1_ps(v); }
  static reg load(const float *p) { return _mm256_load_ps(p); }
  static reg level(const float *p) { return load(p); }
  static void store(float *p, reg v) { _mm256_store_ps(p, v); }
  static reg sub(reg a, reg b) { return _mm256_sub_ps(a, b); }
  static reg fma(reg a, reg b, reg c) { return _mm256_fmadd_ps(a, b, c); }
  // Costs are never negative, so their bit patterns order like integers; the integer minimum runs on ports the float adds leave free.
  static reg min(reg a, reg b) { return _mm256_castsi256_ps(_mm256_min_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b))); }
  static float lowest(reg v) {
    __m128 a = _mm_min_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    a = _mm_min_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_min_ss(a, _mm_movehdup_ps(a)));
  }
  // Lane i gets p[i >> K]: 2^K neighbouring suffixes share a predecessor.
  template <int K> static reg spread(const float *p) {
    if constexpr (K >= 3) return _mm256_broadcast_ss(p);
    if constexpr (K == 2) {
      const reg both = _mm256_castpd_ps(_mm256_broadcast_sd((const double *)p));
      return _mm256_permutevar_ps(both, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
    }
    const reg four = _mm256_broadcast_ps((const __m128 *)p);
    return _mm256_permutevar_ps(four, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
  }
};
#include "cpu/viterbi.inl"
}  // namespace

tq::EncodeBlock tq::encode_block_avx2(int bits, int window) { return pick<Avx2>(bits, window); }
