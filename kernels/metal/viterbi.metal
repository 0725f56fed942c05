// Tail-biting search for the best path of each block: QTIP's Algorithm 4, states equal to kernels/cpu/viterbi.inl's.
//
// A threadgroup has one block. A lane has G neighbouring suffixes j (the low L-K bits of a state: all that the next step sees) and keeps
// the levels of their 64 states in registers for both passes; one step is, for each of its states s = d·J + j,
//   cost'[j] = min over d of  cost[s >> K] + (level[s] - x)²          ties: the lowest d
// Costs are float32 and exact: they are whole numbers, and the cost of suffix 0, subtracted at every step once all suffixes can be reached,
// keeps them below 2^24 (tqtool/kernels/encoding.py proves it for levels and inputs). The K bits of each choice go to `history` in device
// memory, one word a lane and step, and come back through threadgroup memory, some steps at a time, to be walked along by one lane. Every
// lane reads back what it wrote itself, so device memory needs no barrier.
//
// x int16 [blocks, 256] · levels int16 [2^L] · dims [blocks, warmup] → states uint16 [blocks, 256] · history uint32 [blocks, 256, LANES]
// L, K: of the trellis · LANES: 2^L / 64, of the threadgroup · ROWS: of costs, 2, or 1 where 2 are too large: then a barrier stands between
// reading and writing them · REACH: ⌈(L-K)/K⌉, steps after which every suffix can be reached.
// grid.x: one threadgroup for every block.
#include "metal/trellis.h"

threadgroup uint32_t memory[ROWS << (L - K)];  // rows of costs, as bits; on the way back, choices of STEPS steps
threadgroup float inputs[256];
threadgroup uint32_t walk[1];                  // the suffix where the way back stands
constexpr uint32_t J = 1u << (L - K), D = 1u << K, G = J / LANES, STEPS = ROWS * J / LANES;
const uint32_t lane = thread_index_in_threadgroup, block = threadgroup_position_in_grid.x, warmup = dims[1];
const uint32_t own = lane * G;  // the lane's first suffix

float level[D][G];
TQ_UNROLL for (uint32_t d = 0; d < D; ++d)
  TQ_UNROLL for (uint32_t g = 0; g < G; ++g) level[d][g] = float(levels[d * J + own + g]);
for (uint32_t i = lane; i < TQ_BLOCK; i += LANES) inputs[i] = float(x[block * TQ_BLOCK + i]);

uint32_t seam = 0;
for (uint32_t pass = 0; pass < 2; ++pass) {
  // Pass 0 runs over the seam with free ends, to say which suffix stands there. Pass 1 is pinned to it at both ends.
  const uint32_t steps = pass == 0 ? 2 * warmup : TQ_BLOCK, first = pass == 0 ? TQ_BLOCK - warmup : 0, skip = pass == 0 ? warmup : 0;
  // 1e30 is beyond every cost, and stays what it is when some are added; it needs no infinities, which fast-math denies.
  TQ_UNROLL for (uint32_t g = 0; g < G; ++g) memory[own + g] = as_type<uint32_t>(pass == 0 || own + g == seam ? 0.0f : 1e30f);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  uint32_t row = 0;  // 0 or J: where the costs of the step before are
  for (uint32_t i = 0; i < steps; ++i) {
    const float input = inputs[(first + i) % TQ_BLOCK], base = i < REACH ? 0.0f : as_type<float>(memory[row]);
    float best[G];
    uint32_t choice[G], word = 0;
    TQ_UNROLL for (uint32_t d = 0; d < D; ++d) {
      TQ_UNROLL for (uint32_t g = 0; g < G; ++g) {
        const float before = as_type<float>(memory[row + (d << (L - 2 * K)) + ((own + g) >> K)]) - base;
        const float difference = level[d][g] - input, cost = metal::fma(difference, difference, before);
        const bool better = d == 0 || cost < best[g];
        best[g] = better ? cost : best[g];
        choice[g] = better ? d : choice[g];
      }
    }
    if (ROWS == 1)
      threadgroup_barrier(mem_flags::mem_threadgroup);
    else
      row = J - row;
    TQ_UNROLL for (uint32_t g = 0; g < G; ++g) {
      memory[row + own + g] = as_type<uint32_t>(best[g]);
      word |= choice[g] << (g * K);
    }
    if (i >= skip) history[(block * TQ_BLOCK + i - skip) * LANES + lane] = word;
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  if (pass == 0) {
    // The lowest suffix of the lowest cost: each lane's own, then one lane through them. The costs are not needed any more.
    uint32_t lowest = own;
    for (uint32_t j = own; j < own + G; ++j)
      if (as_type<float>(memory[row + j]) < as_type<float>(memory[row + lowest])) lowest = j;
    const uint32_t cost = memory[row + lowest];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    memory[2 * lane] = cost;
    memory[2 * lane + 1] = lowest;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (lane == 0) {
      uint32_t at = 0;
      for (uint32_t l = 1; l < LANES; ++l)
        if (as_type<float>(memory[2 * l]) < as_type<float>(memory[2 * at])) at = l;
      walk[0] = memory[2 * at + 1];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  for (uint32_t top = steps - skip; top > 0;) {
    const uint32_t count = min(STEPS, top), bottom = top - count;
    for (uint32_t s = 0; s < count; ++s) memory[s * LANES + lane] = history[(block * TQ_BLOCK + bottom + s) * LANES + lane];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (lane == 0) {
      uint32_t j = walk[0];
      for (uint32_t s = count; s-- > 0;) {
        const uint32_t state = (memory[s * LANES + j / G] >> (j % G * K) & (D - 1)) * J + j;
        if (pass == 1) states[block * TQ_BLOCK + bottom + s] = static_cast<uint16_t>(state);
        j = state >> K;
      }
      walk[0] = j;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    top = bottom;
  }
  seam = walk[0];  // pass 1 starts, and on its way back begins, where pass 0 ended: walk[0] stays as it is
}
