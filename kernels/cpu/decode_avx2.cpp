// Eight weights at a time with AVX2.
//
// Eight symbols are k whole bytes, so the eight windows of steps t..t+7 (t a multiple of 8) start at fixed bits (7-i)*k above a byte
// boundary and end within 8 bytes of it: one 8-byte load, one byte shuffle that gives each lane its own four bytes, one shift per lane.
#include "cpu/decode.h"

#include <immintrin.h>

#include <cstring>

#include "common/trellis_decode.h"

namespace {
#include "cpu/decode.inl"

struct Lanes {
  __m256i bytes, shift, mask;
  Lanes(int k, int window) {
    alignas(32) uint8_t index[32];
    alignas(32) uint32_t by[8];
    for (int i = 0; i < 8; i++) {
      const int bit = (7 - i) * k;
      by[i] = bit & 7;
      for (int b = 0; b < 4; b++) index[4 * i + b] = (uint8_t)((bit >> 3) + b);
    }
    bytes = _mm256_load_si256((const __m256i *)index);
    shift = _mm256_load_si256((const __m256i *)by);
    mask = _mm256_set1_epi32((1 << window) - 1);
  }
  __m256i states(const uint8_t *at) const {
    int64_t word;
    std::memcpy(&word, at, 8);
    return _mm256_and_si256(_mm256_srlv_epi32(_mm256_shuffle_epi8(_mm256_set1_epi64x(word), bytes), shift), mask);
  }
};

// Sum of the four bytes of each lane, minus the mean, as float.
inline __m256 byte_sum(__m256i x) {
  const __m256i pairs = _mm256_maddubs_epi16(x, _mm256_set1_epi8(1));
  const __m256i sum = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(sum, _mm256_set1_epi32(TQ_BYTE_SUM_MEAN)));
}

template <tq::Code C> inline __m256 value(const tq::Packed &p, __m256i state) {
  if constexpr (C == tq::Code::mul1) return byte_sum(_mm256_mullo_epi32(state, _mm256_set1_epi32((int)TQ_MUL1_MULTIPLIER)));
  if constexpr (C == tq::Code::one_mad)
    return byte_sum(_mm256_add_epi32(_mm256_mullo_epi32(state, _mm256_set1_epi32((int)TQ_1MAD_MULTIPLIER)), _mm256_set1_epi32((int)TQ_1MAD_ADDEND)));
  return _mm256_i32gather_ps(p.table, state, 4);
}

template <tq::Code C> inline void groups(const tq::Packed &p, const uint8_t *bytes, float *levels) {
  const Lanes lanes(p.bits, p.window);
  const int n = p.block / 8;
  for (int g = 0; g < n; g++) _mm256_store_ps(levels + 8 * g, value<C>(p, lanes.states(bytes + (size_t)(n - 1 - g) * p.bits)));
}

struct Avx2 {
  static void block(const tq::Packed &p, const uint32_t *words, float *levels) {
    // The first steps' windows wrap round to the block's first bytes: decode from a copy with those appended.
    alignas(64) uint8_t bytes[kMaxBlock / 2 + 8];
    const size_t n = (size_t)p.block * p.bits / 8;
    std::memcpy(bytes, words, n);
    std::memcpy(bytes + n, words, 8);
    switch (p.code) {
      case tq::Code::mul1: return groups<tq::Code::mul1>(p, bytes, levels);
      case tq::Code::one_mad: return groups<tq::Code::one_mad>(p, bytes, levels);
      case tq::Code::table: return groups<tq::Code::table>(p, bytes, levels);
    }
  }
};
}  // namespace

const tq::Kernels tq::kernels_avx2 = {expand<Avx2>, reduce<Avx2>, scatter<Avx2>};
