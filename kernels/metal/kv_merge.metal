// The splits of kv_attend.metal put together, divided, and rotated back once for each query: y = signs ⊙ (H v / √D).
//
// A threadgroup has one row; its simdgroups share the splits, and the first of them adds up and rotates. Splits without a token weigh nothing.
//
// parts [splits, rows, D + 2] · signs [D] · root [1]: 1/√D · dims [splits, rows] → y [rows, D]
// T: type of y · D · WARPS: simdgroups. grid: one threadgroup for every row.
#include "metal/kv.h"

constexpr int N = D / 32;
threadgroup float sums[WARPS * (D + 2)];

const uint32_t splits = dims[0], rows = dims[1], row = threadgroup_position_in_grid.x;
const uint32_t lane = thread_index_in_simdgroup, warp = simdgroup_index_in_threadgroup;
float top = TQ_KV_NOTHING, denominator = 0.0f, value[N];
TQ_UNROLL for (int i = 0; i < N; ++i) value[i] = 0.0f;
for (uint32_t s = warp; s < splits; s += WARPS) top = max(top, float(parts[(s * rows + row) * (D + 2) + D]));
for (uint32_t s = warp; s < splits; s += WARPS) {
  const uint32_t line = (s * rows + row) * (D + 2);
  const float weight = metal::precise::exp2(parts[line + D] - top);
  denominator += weight * parts[line + D + 1];
  TQ_UNROLL for (int i = 0; i < N; ++i) value[i] += weight * parts[line + 32 * i + lane];
}
TQ_UNROLL for (int i = 0; i < N; ++i) sums[warp * (D + 2) + 32 * i + lane] = value[i];
if (lane == 0) {
  sums[warp * (D + 2) + D] = top;
  sums[warp * (D + 2) + D + 1] = denominator;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (warp == 0) {
  top = TQ_KV_NOTHING;
  for (uint32_t w = 0; w < WARPS; ++w) top = max(top, float(sums[w * (D + 2) + D]));
  denominator = 0.0f;
  TQ_UNROLL for (int i = 0; i < N; ++i) value[i] = 0.0f;
  for (uint32_t w = 0; w < WARPS; ++w) {
    const uint32_t line = w * (D + 2);
    const float weight = metal::precise::exp2(float(sums[line + D]) - top);
    denominator += weight * float(sums[line + D + 1]);
    TQ_UNROLL for (int i = 0; i < N; ++i) value[i] += weight * float(sums[line + 32 * i + lane]);
  }
  tq_kv_hadamard<N>(lane, value);
  TQ_UNROLL for (int i = 0; i < N; ++i) y[row * D + 32 * i + lane] = static_cast<T>(value[i] * root[0] / denominator * signs[32 * i + lane]);
}
