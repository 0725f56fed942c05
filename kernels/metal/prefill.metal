// y = x Wᵀ for 5 to 32 rows of x: a threadgroup decodes 32 outputs × 32 inputs of W into its memory, a run a thread, and multiplies them by
// 8 × 8 matrices. Every weight is decoded once for all rows. Any layout whose stride is a multiple of 8.
//
// x [m, in] · words · scales [rows] · dims [rows, cols, stride, m] → y [m, out]
// T: type of y · K, L, CODE: of the trellis · AXIS: 0 or 1 · TILE: 0 or 16 · MT: ⌈m/8⌉. grid.x: 128 threads for every 32 outputs.
#include <metal_simdgroup_matrix>
#include "metal/trellis.h"

#define TQ_LINE 36  // 32 and a pad against bank conflicts
threadgroup float weights[32 * TQ_LINE];       // [output, input] for axis 1, [input, output] for axis 0: as a run lies in the stream
threadgroup float inputs[8 * MT * TQ_LINE];    // [row of x, input]; at the end [row of x, output]
const uint32_t rows = dims[0], cols = dims[1], stride = dims[2], m_rows = dims[3];
const uint32_t n_in = AXIS == 1 ? cols : rows, n_out = AXIS == 1 ? rows : cols;
const uint32_t thread_index = thread_index_in_threadgroup, group = simdgroup_index_in_threadgroup;
const uint32_t out_first = threadgroup_position_in_grid.x * 32;
const uint32_t line = thread_index / 4, place = thread_index % 4 * TQ_RUN;  // the thread's run among the 32 × 32 weights

simdgroup_float8x8 sums[MT];
TQ_UNROLL for (uint32_t t = 0; t < MT; ++t) sums[t] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);

for (uint32_t in_first = 0; in_first < n_in; in_first += 32) {
  const uint32_t row = line + (AXIS == 1 ? out_first : in_first), col = place + (AXIS == 1 ? in_first : out_first);
  if (row < rows && col < stride) {
    const uint32_t run = TILE > 0 ? (row / TQ_TILE * (stride / TQ_TILE) + col / TQ_TILE) * TQ_RUNS + row % TQ_TILE * 2 + col % TQ_TILE / TQ_RUN
                                  : row * (stride / TQ_RUN) + col / TQ_RUN;
    TqCursor<K> cursor;
    cursor.begin(words, run);
    const TqRun bits = cursor.run();
    // Along the outputs a row's scale belongs to the weight; along the inputs it waits for the sum.
    const float factor = AXIS == 1 ? 1.0f : tq_unit<CODE>() * float(scales[row]);
    TQ_UNROLL for (uint32_t i = 0; i < TQ_RUN; ++i) weights[line * TQ_LINE + place + i] = factor * tq_level<CODE>(tq_run_state(bits, i, K, L));
  } else {
    TQ_UNROLL for (uint32_t i = 0; i < TQ_RUN; ++i) weights[line * TQ_LINE + place + i] = 0.0f;
  }
  for (uint32_t i = thread_index; i < 8 * MT * 32; i += 128) {
    const uint32_t m = i / 32, in = in_first + i % 32;
    inputs[m * TQ_LINE + i % 32] = m < m_rows && in < n_in ? float(x[m * n_in + in]) : 0.0f;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint32_t k = 0; k < 32; k += 8) {
    simdgroup_float8x8 weight, input;
    if (AXIS == 1)
      simdgroup_load(weight, &weights[group * 8 * TQ_LINE + k], TQ_LINE, ulong2(0), true);
    else
      simdgroup_load(weight, &weights[k * TQ_LINE + group * 8], TQ_LINE);
    TQ_UNROLL for (uint32_t t = 0; t < MT; ++t) {
      simdgroup_load(input, &inputs[t * 8 * TQ_LINE + k], TQ_LINE);
      simdgroup_multiply_accumulate(sums[t], input, weight, sums[t]);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

TQ_UNROLL for (uint32_t t = 0; t < MT; ++t) simdgroup_store(sums[t], &inputs[t * 8 * TQ_LINE + group * 8], TQ_LINE);
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint32_t i = thread_index; i < 8 * MT * 32; i += 128) {
  const uint32_t m = i / 32, out = out_first + i % 32;
  if (m < m_rows && out < n_out) {
    const float sum = inputs[m * TQ_LINE + i % 32];
    y[m * n_out + out] = static_cast<T>(AXIS == 1 ? sum * (tq_unit<CODE>() * float(scales[out])) : sum);
  }
}
