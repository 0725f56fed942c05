// The reading copy of the decoder: one weight at a time through kernels/common/trellis_decode.h.
#include "cpu/decode.h"

#include <cstring>

#include "common/trellis_decode.h"

namespace {
#include "cpu/decode.inl"

struct Scalar {
  static void block(const tq::Packed &p, const uint32_t *words, float *levels) {
    constexpr uint32_t T = tq::kBlock;
    const uint32_t n_words = T / 32 * p.bits;
    for (uint32_t t = 0; t < T; t++) {
      const uint32_t state = tq_state(words, n_words, T, t, p.bits, p.window);
      switch (p.code) {
        case tq::Code::mul1: levels[t] = (float)tq_level_mul1(state); break;
        case tq::Code::one_mad: levels[t] = (float)tq_level_1mad(state); break;
        case tq::Code::table: levels[t] = p.table[state]; break;
      }
    }
  }
};
}  // namespace

const tq::Kernels tq::kernels_scalar = {"scalar", expand<Scalar>, reduce<Scalar>, scatter<Scalar>, nullptr};
