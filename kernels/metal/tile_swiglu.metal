// y = silu(x Gᵀ) ⊙ (x Uᵀ), both matrices in squares of 16 × 16: tile.metal for two matrices, x read once for both. Sums, silu and
// product stay in float32; the result is rounded once.
//
// x [M, cols] · words, scales of G · up_words, up_scales of U · dims [rows, cols, stride] → y [M, rows]
// T: type of y · K, UP_K: bits of G and U · L, CODE: of both · M: rows of x · SIMDGROUPS. grid.x: one threadgroup for every strip.
#include "metal/trellis.h"

threadgroup float parts[SIMDGROUPS * 16 * M];
threadgroup float up_parts[SIMDGROUPS * 16 * M];
const uint32_t rows = dims[0], cols = dims[1], squares = dims[2] / TQ_TILE;
const uint32_t lane = thread_index_in_simdgroup, part = simdgroup_index_in_threadgroup;
const uint32_t strip = threadgroup_position_in_grid.x;

TqCursor<K> gate;
TqCursor<UP_K> up;
gate.begin(words, (strip * squares + part) * TQ_RUNS + lane);
up.begin(up_words, (strip * squares + part) * TQ_RUNS + lane);
float gates[M], ups[M];
TQ_UNROLL for (uint32_t m = 0; m < M; ++m) gates[m] = ups[m] = 0.0f;
for (uint32_t square = part; square < squares; square += SIMDGROUPS) {
  float in[M][TQ_RUN];
  tq_load_run<M>(x, cols, square * TQ_TILE + lane % 2 * TQ_RUN, in);
  tq_add_run<K, L, CODE, M>(gate.run(), in, gates);
  tq_add_run<UP_K, L, CODE, M>(up.run(), in, ups);
  gate.skip(SIMDGROUPS);
  up.skip(SIMDGROUPS);
}
TQ_UNROLL for (uint32_t m = 0; m < M; ++m) {
  const float g = gates[m] + simd_shuffle_xor(gates[m], 1), u = ups[m] + simd_shuffle_xor(ups[m], 1);
  if (lane % 2 == 0) {
    parts[(part * 16 + lane / 2) * M + m] = g;
    up_parts[(part * 16 + lane / 2) * M + m] = u;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint32_t i = thread_index_in_threadgroup; i < 16 * M; i += 32 * SIMDGROUPS) {
  const uint32_t row = strip * TQ_TILE + i / M, m = i % M;
  float g = 0.0f, u = 0.0f;
  for (uint32_t s = 0; s < SIMDGROUPS; ++s) {
    g += parts[s * 16 * M + i];
    u += up_parts[s * 16 * M + i];
  }
  if (row < rows) {
    const float unit = tq_unit<CODE>();
    y[m * rows + row] = static_cast<T>(tq_silu(g * (unit * float(scales[row]))) * (u * (unit * float(up_scales[row]))));
  }
}
