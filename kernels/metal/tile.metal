// y = x Wᵀ, W in squares of 16 × 16 (axis 1, tile 16). A threadgroup has one strip of 16 rows; its SIMDGROUPS simdgroups take the
// strip's squares in turn, and add up in the order of their numbers. A lane has half a row of a square: 8 weights of row lane/2.
//
// x [M, cols] · words · scales [rows] · dims [rows, cols, stride] → y [M, rows]
// T: type of y · K, L, CODE: of the trellis · M: rows of x · SIMDGROUPS. grid.x: one threadgroup for every strip.
#include "metal/trellis.h"

threadgroup float parts[SIMDGROUPS * 16 * M];
const uint32_t rows = dims[0], cols = dims[1], squares = dims[2] / TQ_TILE;
const uint32_t lane = thread_index_in_simdgroup, part = simdgroup_index_in_threadgroup;
const uint32_t strip = threadgroup_position_in_grid.x;

TqCursor<K> cursor;
cursor.begin(words, (strip * squares + part) * TQ_RUNS + lane);
float sums[M];
TQ_UNROLL for (uint32_t m = 0; m < M; ++m) sums[m] = 0.0f;
for (uint32_t square = part; square < squares; square += SIMDGROUPS) {
  float in[M][TQ_RUN];
  tq_load_run<M>(x, cols, square * TQ_TILE + lane % 2 * TQ_RUN, in);
  tq_add_run<K, L, CODE, M>(cursor.run(), in, sums);
  cursor.skip(SIMDGROUPS);
}
TQ_UNROLL for (uint32_t m = 0; m < M; ++m) {
  const float sum = sums[m] + simd_shuffle_xor(sums[m], 1);
  if (lane % 2 == 0) parts[(part * 16 + lane / 2) * M + m] = sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint32_t i = thread_index_in_threadgroup; i < 16 * M; i += 32 * SIMDGROUPS) {
  const uint32_t row = strip * TQ_TILE + i / M, m = i % M;
  float sum = 0.0f;
  for (uint32_t s = 0; s < SIMDGROUPS; ++s) sum += parts[s * 16 * M + i];
  if (row < rows) y[m * rows + row] = static_cast<T>(sum * (tq_unit<CODE>() * float(scales[row])));
}
