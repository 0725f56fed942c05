// y = silu(x Gᵀ) ⊙ (x Uᵀ), both matrices coded along their inputs, in rows: one simdgroup has one row of each, x is read once for both.
// Sums, silu and product stay in float32; the result is rounded once.
//
// x [M, cols] · words, scales of G · up_words, up_scales of U · dims [rows, cols, stride] → y [M, rows]
// T: type of y · K, UP_K: bits of G and U · L, CODE: of both · M: rows of x. grid.x: 32 lanes for every row.
#include "metal/trellis.h"

const uint32_t rows = dims[0], cols = dims[1], stride = dims[2];
const uint32_t lane = thread_index_in_simdgroup;
const uint32_t row = thread_position_in_grid.x / 32;

// Beyond the last row: compute the last one again and write nothing, so that no lane leaves before simd_sum.
const uint32_t run = min(row, rows - 1) * (stride / TQ_RUN) + lane;
TqCursor<K> gate;
TqCursor<UP_K> up;
gate.begin(words, run);
up.begin(up_words, run);
float gates[M], ups[M];
TQ_UNROLL for (uint32_t m = 0; m < M; ++m) gates[m] = ups[m] = 0.0f;
for (uint32_t col = lane * TQ_RUN; col < cols; col += TQ_BLOCK) {
  float in[M][TQ_RUN];
  tq_load_run<M>(x, cols, col, in);
  tq_add_run<K, L, CODE, M>(gate.run(), in, gates);
  tq_add_run<UP_K, L, CODE, M>(up.run(), in, ups);
  gate.skip(1);
  up.skip(1);
}
TQ_UNROLL for (uint32_t m = 0; m < M; ++m) {
  const float g = simd_sum(gates[m]), u = simd_sum(ups[m]);
  if (lane == 0 && row < rows) {
    const float unit = tq_unit<CODE>();
    y[m * rows + row] = static_cast<T>(tq_silu(g * (unit * float(scales[row]))) * (u * (unit * float(up_scales[row]))));
  }
}
