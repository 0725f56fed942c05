// What the Metal kernels share: the decode rule for one lane, and products of its eight weights.
//
// A simdgroup of 32 lanes decodes one block of 256 weights at a time, eight consecutive steps a lane: two words a lane, all words of
// the block in one sweep, and what does not change from block to block (place and shift of the lane's words) is worked out once.
// Levels are summed as they come out of the hash; the code's unit and, where a lane's weights share a row, the row's scale are
// multiplied onto the finished sum. Indices are 32 bits: supports() refuses matrices of 2^31 weights.
#ifndef TQ_METAL_TRELLIS_H
#define TQ_METAL_TRELLIS_H

#define TQ_FN METAL_FUNC
#define TQ_WORDS const device uint32_t *
#define TQ_AS_FLOAT(bits) as_type<float>(bits)
// Folding 16-bit halves by their own names: a shift right takes four cycles where an addition takes one (M1).
#define TQ_SUM4(bytes) tq_fold(as_type<ushort2>(((bytes) & 0x00FF00FFu) + (((bytes) >> 8) & 0x00FF00FFu)))
METAL_FUNC uint32_t tq_fold(ushort2 pair) { return uint32_t(pair.x) + uint32_t(pair.y); }

#include "common/trellis_decode.h"

// Arrays live in registers only where every index is known: loops over them are unrolled, whatever the compiler thinks of it.
#ifndef TQ_UNROLL  // CUDA says it in another way
#define TQ_UNROLL _Pragma("clang loop unroll(full)")
#endif

#define TQ_BLOCK 256u
#define TQ_RUN 8u
#define TQ_RUNS 32u  // runs of a block, lanes of a simdgroup
#define TQ_TILE 16u

// Value of a state in units of tq_unit; float32, exact.
template <int CODE>
METAL_FUNC float tq_level(uint32_t state) {
  if (CODE == TQ_CODE_3INST) {
    const half2 halves = as_type<half2>(tq_halves_3inst(state));
    return float(halves.x) + float(halves.y);
  }
  return tq_level_of_sum(tq_sum4(CODE == TQ_CODE_MUL1 ? tq_hash_mul1(state) : tq_hash_1mad(state)));
}

template <int CODE>
METAL_FUNC float tq_unit() {
  return CODE == TQ_CODE_3INST ? TQ_3INST_INVERSE_RMS : CODE == TQ_CODE_MUL1 ? TQ_MUL1_INVERSE_UNIT : TQ_1MAD_INVERSE_UNIT;
}

// A lane's place in the stream: run number `run` of it (run 0: the first eight weights), then the same place in other blocks.
template <int K>
struct TqCursor {
  const device uint32_t *block;
  uint32_t low, high, shift;

  METAL_FUNC void begin(const device uint32_t *words, uint32_t run) {
    const uint32_t bit = tq_run_bit(TQ_BLOCK, TQ_RUN * (run % TQ_RUNS), K);
    block = words + run / TQ_RUNS * (8 * K);
    low = bit / 32;
    high = low + 1 == 8 * K ? 0 : low + 1;
    shift = bit % 32;
  }
  METAL_FUNC TqRun run() const { return tq_run(block[low], block[high], shift); }
  METAL_FUNC void skip(uint32_t blocks) { block += blocks * (8 * K); }
};

// Columns [first, first + 8) of every row of x ([M, cols]); zero beyond the last column, where the stream may hold anything.
template <int M, typename X>
METAL_FUNC void tq_load_run(X x, uint32_t cols, uint32_t first, thread float (&in)[M][TQ_RUN]) {
  if (first + TQ_RUN <= cols) {
    TQ_UNROLL for (uint32_t m = 0; m < M; ++m)
      TQ_UNROLL for (uint32_t i = 0; i < TQ_RUN; ++i) in[m][i] = float(x[m * cols + first + i]);
  } else {
    TQ_UNROLL for (uint32_t m = 0; m < M; ++m)
      TQ_UNROLL for (uint32_t i = 0; i < TQ_RUN; ++i) in[m][i] = first + i < cols ? float(x[m * cols + first + i]) : 0.0f;
  }
}

// sums[m] += the run's levels times in[m]: each weight is decoded once for all M rows of x.
template <int K, int L, int CODE, int M>
METAL_FUNC void tq_add_run(TqRun run, const thread float (&in)[M][TQ_RUN], thread float (&sums)[M]) {
  TQ_UNROLL for (uint32_t i = 0; i < TQ_RUN; ++i) {
    const float level = tq_level<CODE>(tq_run_state(run, i, K, L));
    TQ_UNROLL for (uint32_t m = 0; m < M; ++m) sums[m] += level * in[m][i];
  }
}

METAL_FUNC float tq_silu(float gate) { return gate / (1.0f + metal::precise::exp(-gate)); }

#endif
