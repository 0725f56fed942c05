// The stored matrix, dense: float32 products of value and scale, rounded once to T, as a twin of --fake-quant stores them.
// One thread has one run of the stream. Any stride: a run may hold the end of a row and the start of the next.
//
// words · scales [rows] · dims [rows, cols, stride, blocks] → y [rows, cols]
// T: type of y · K, L, CODE: of the trellis · TILE: 0 or 16. grid.x: one thread for every run.
#include "metal/trellis.h"

const uint32_t rows = dims[0], cols = dims[1], stride = dims[2], blocks = dims[3];
const uint32_t index = thread_position_in_grid.x;
if (index < blocks * TQ_RUNS) {
  TqCursor<K> cursor;
  cursor.begin(words, index);
  const TqRun run = cursor.run();
  uint32_t row, col;
  if (TILE > 0) {
    const uint32_t squares = stride / TQ_TILE, square = index / TQ_RUNS, half_row = index % TQ_RUNS;
    row = square / squares * TQ_TILE + half_row / 2;
    col = square % squares * TQ_TILE + half_row % 2 * TQ_RUN;
  } else {
    row = index * TQ_RUN / stride;
    col = index * TQ_RUN % stride;
  }
  TQ_UNROLL for (uint32_t i = 0; i < TQ_RUN; ++i) {
    const float value = tq_level<CODE>(tq_run_state(run, i, K, L)) * tq_unit<CODE>();
    if (row < rows && col < cols) y[row * cols + col] = static_cast<T>(value * float(scales[row]));
    if (++col == stride) {
      col = 0;
      ++row;
    }
  }
}
