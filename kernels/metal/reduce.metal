// y = x Wᵀ, W coded along its inputs, in rows (axis 1, tile 0). One simdgroup has R rows of W and walks along them together, so that
// x is read once for R rows; stride is a multiple of 8, blocks may run on across rows.
//
// x [M, cols] · words · scales [rows] · dims [rows, cols, stride] → y [M, rows]
// T: type of y · K, L, CODE: of the trellis · M: rows of x · R: rows of W in a simdgroup. grid.x: 32 lanes for every R rows.
#include "metal/trellis.h"

const uint32_t rows = dims[0], cols = dims[1], stride = dims[2];
const uint32_t lane = thread_index_in_simdgroup;
const uint32_t first = thread_position_in_grid.x / 32 * R;

TqCursor<K> cursors[R];
float sums[R][M];
TQ_UNROLL for (uint32_t r = 0; r < R; ++r) {
  // Beyond the last row: compute the last one again and write nothing, so that no lane leaves before simd_sum.
  cursors[r].begin(words, min(first + r, rows - 1) * (stride / TQ_RUN) + lane);
  TQ_UNROLL for (uint32_t m = 0; m < M; ++m) sums[r][m] = 0.0f;
}
for (uint32_t col = lane * TQ_RUN; col < cols; col += TQ_BLOCK) {
  float in[M][TQ_RUN];
  tq_load_run<M>(x, cols, col, in);
  TQ_UNROLL for (uint32_t r = 0; r < R; ++r) {
    tq_add_run<K, L, CODE, M>(cursors[r].run(), in, sums[r]);
    cursors[r].skip(1);
  }
}
TQ_UNROLL for (uint32_t r = 0; r < R; ++r) {
  TQ_UNROLL for (uint32_t m = 0; m < M; ++m) {
    const float sum = simd_sum(sums[r][m]);
    if (lane == 0 && first + r < rows) y[m * rows + first + r] = static_cast<T>(sum * (tq_unit<CODE>() * float(scales[first + r])));
  }
}
