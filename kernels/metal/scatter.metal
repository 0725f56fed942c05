// y = x Wᵀ, W coded along its outputs (axis 0): the stored matrix is [in, out] and a row of it is scattered over the results. A
// threadgroup has 256 outputs, eight a lane; the inputs are split over its SIMDGROUPS simdgroups and over `splits` threadgroups. Sums of
// a threadgroup are added in the order of the simdgroups here, those of the splits by sum_parts.metal: no atomics, always the same sum.
//
// x [M, rows] · words · scales [rows] · dims [rows, cols, stride, splits] → y [splits, M, cols]
// T: type of y · K, L, CODE: of the trellis · M: rows of x · SIMDGROUPS · WHOLE: stride is a multiple of 256, a lane's place in its block
// is the same in every row. grid: one threadgroup for every 256 columns, splits.
#include "metal/trellis.h"

threadgroup float parts[SIMDGROUPS * 256];
const uint32_t rows = dims[0], cols = dims[1], runs = dims[2] / TQ_RUN, splits = dims[3];
const uint32_t lane = thread_index_in_simdgroup, part = simdgroup_index_in_threadgroup;
const uint32_t split = threadgroup_position_in_grid.y;
// A run that begins beyond the row stays inside the stream by reading the row's last one, and is not written.
const uint32_t place = min(threadgroup_position_in_grid.x * TQ_RUNS + lane, runs - 1);

float sums[M][TQ_RUN];
TQ_UNROLL for (uint32_t m = 0; m < M; ++m)
  TQ_UNROLL for (uint32_t i = 0; i < TQ_RUN; ++i) sums[m][i] = 0.0f;

const uint32_t step = splits * SIMDGROUPS;
uint32_t row = split * SIMDGROUPS + part;
TqCursor<K> cursor;
cursor.begin(words, row * runs + place);
for (; row < rows; row += step) {
  if (!WHOLE) cursor.begin(words, row * runs + place);
  const TqRun run = cursor.run();
  if (WHOLE) cursor.skip(step * runs / TQ_RUNS);
  const float scale = tq_unit<CODE>() * float(scales[row]);
  float factors[M];
  TQ_UNROLL for (uint32_t m = 0; m < M; ++m) factors[m] = scale * float(x[m * rows + row]);
  TQ_UNROLL for (uint32_t i = 0; i < TQ_RUN; ++i) {
    const float level = tq_level<CODE>(tq_run_state(run, i, K, L));
    TQ_UNROLL for (uint32_t m = 0; m < M; ++m) sums[m][i] += level * factors[m];
  }
}

TQ_UNROLL for (uint32_t m = 0; m < M; ++m) {
  if (m > 0) threadgroup_barrier(mem_flags::mem_threadgroup);  // the row before this one has been read
  TQ_UNROLL for (uint32_t i = 0; i < TQ_RUN; ++i) parts[part * TQ_BLOCK + lane * TQ_RUN + i] = sums[m][i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint32_t i = thread_index_in_threadgroup; i < TQ_BLOCK; i += 32 * SIMDGROUPS) {
    const uint32_t col = threadgroup_position_in_grid.x * TQ_BLOCK + i;
    float sum = 0.0f;
    for (uint32_t s = 0; s < SIMDGROUPS; ++s) sum += parts[s * TQ_BLOCK + i];
    if (col < cols) y[(split * M + m) * cols + col] = static_cast<T>(sum);
  }
}
