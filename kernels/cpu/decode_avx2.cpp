// Eight weights at a time with AVX2.
//
// Eight symbols are K whole bytes, so the windows of lanes i = 0..7 start at fixed bits (7-i) K above a byte boundary and end within 8 bytes of it: one
// 8-byte load, one byte shuffle that gives each lane its own four bytes, one shift per lane.
#include "cpu/decode.h"

#include <immintrin.h>

#include <cstring>

#include "common/trellis_decode.h"

namespace {
#include "cpu/decode.inl"

struct Avx2 {
  using reg = __m256;
  static constexpr int lanes = 8, rows = 8;
  static reg zero() { return _mm256_setzero_ps(); }
  static reg broadcast(float v) { return _mm256_set1_ps(v); }
  static reg load(const float *p) { return _mm256_loadu_ps(p); }
  static void store(float *p, reg v) { _mm256_storeu_ps(p, v); }
  static reg fma(reg a, reg b, reg c) { return _mm256_fmadd_ps(a, b, c); }
  static float sum(reg v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)), two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }

  template <tq::Code C, int K> struct Group {
    __m256i bytes, shift, mask;
    const float *table;
    explicit Group(const tq::Packed &p) : mask(_mm256_set1_epi32((1 << p.window) - 1)), table(p.table) {
      alignas(32) uint8_t index[32];
      alignas(32) uint32_t by[8];
      for (int i = 0; i < 8; i++) {
        const int bit = (7 - i) * K;
        by[i] = bit & 7;
        for (int b = 0; b < 4; b++) index[4 * i + b] = (uint8_t)((bit >> 3) + b);
      }
      bytes = _mm256_load_si256((const __m256i *)index);
      shift = _mm256_load_si256((const __m256i *)by);
    }
    // Sum of the four bytes of each lane, minus the mean, as float.
    static reg byte_sum(__m256i x) {
      const __m256i pairs = _mm256_maddubs_epi16(x, _mm256_set1_epi8(1));
      const __m256i sum = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
      return _mm256_cvtepi32_ps(_mm256_sub_epi32(sum, _mm256_set1_epi32(TQ_BYTE_SUM_MEAN)));
    }
    reg levels(const uint8_t *at, int part) const {
      int64_t word;
      std::memcpy(&word, at + (1 - part) * K, 8);
      const __m256i state = _mm256_and_si256(_mm256_srlv_epi32(_mm256_shuffle_epi8(_mm256_set1_epi64x(word), bytes), shift), mask);
      if constexpr (C == tq::Code::table) return _mm256_i32gather_ps(table, state, 4);
      const __m256i hash = _mm256_mullo_epi32(state, _mm256_set1_epi32((int)(C == tq::Code::mul1 ? TQ_MUL1_MULTIPLIER : TQ_1MAD_MULTIPLIER)));
      return byte_sum(C == tq::Code::mul1 ? hash : _mm256_add_epi32(hash, _mm256_set1_epi32(TQ_1MAD_ADDEND)));
    }
  };
};
#include "cpu/decode_groups.inl"
}  // namespace

const tq::Kernels tq::kernels_avx2 = {"avx2", expand<Decoder<Avx2>>, reduce<Decoder<Avx2>>, scatter<Decoder<Avx2>>, product<Avx2>};
