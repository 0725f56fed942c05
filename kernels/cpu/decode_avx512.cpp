// Sixteen weights at a time with AVX-512, its byte permutations (VBMI) and byte products (VNNI): a load, a selection of bits, a mask, a multiplication,
// a sum of bytes and a conversion.
#include "cpu/decode.h"

#include <immintrin.h>

#include <cstring>

#include "common/trellis_decode.h"

namespace {
#include "cpu/decode.inl"

struct Avx512 {
  using reg = __m512;
  static constexpr int lanes = 16, rows = 16;
  static reg zero() { return _mm512_setzero_ps(); }
  static reg broadcast(float v) { return _mm512_set1_ps(v); }
  static reg load(const float *p) { return _mm512_loadu_ps(p); }
  static void store(float *p, reg v) { _mm512_storeu_ps(p, v); }
  static reg fma(reg a, reg b, reg c) { return _mm512_fmadd_ps(a, b, c); }
  static float sum(reg v) { return _mm512_reduce_add_ps(v); }

  template <tq::Code C, int K> struct Group {
    __m512i bits, mask;
    const float *table;
    explicit Group(const tq::Packed &p) : mask(_mm512_set1_epi32((1 << p.window) - 1)), table(p.table) {
      // Byte b of lane i comes from bit (15 - i) K + 8 b of the group; with four bits the lower half of the lanes has a word of its own, 32 bits on.
      alignas(64) uint8_t from[64];
      for (int i = 0; i < 16; i++)
        for (int b = 0; b < 4; b++) from[4 * i + b] = (uint8_t)(((K == 4 ? 7 - i % 8 : 15 - i) * K + 8 * b) & 63);
      bits = _mm512_load_si512(from);
    }
    static __m512i word(const uint8_t *at) {
      int64_t w;
      std::memcpy(&w, at, 8);
      return _mm512_set1_epi64(w);
    }
    reg levels(const uint8_t *at, int) const {
      const __m512i words = K == 4 ? _mm512_mask_blend_epi64(0xF0, word(at + 4), word(at)) : word(at);
      const __m512i state = _mm512_and_si512(_mm512_multishift_epi64_epi8(bits, words), mask);
      if constexpr (C == tq::Code::table) return _mm512_i32gather_ps(state, table, 4);
      __m512i hash = _mm512_mullo_epi32(state, _mm512_set1_epi32((int)(C == tq::Code::mul1 ? TQ_MUL1_MULTIPLIER : TQ_1MAD_MULTIPLIER)));
      if constexpr (C == tq::Code::one_mad) hash = _mm512_add_epi32(hash, _mm512_set1_epi32(TQ_1MAD_ADDEND));
      return _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_set1_epi32(-TQ_BYTE_SUM_MEAN), hash, _mm512_set1_epi8(1)));
    }
  };
};
#include "cpu/decode_groups.inl"
}  // namespace

const tq::Kernels tq::kernels_avx512 = {"avx512", expand<Decoder<Avx512>>, reduce<Decoder<Avx512>>, scatter<Decoder<Avx512>>, product<Avx512>};
