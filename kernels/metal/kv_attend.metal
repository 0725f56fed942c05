// Attention of one token over packed keys and values, a split of the tokens: softmax(scale · q Kᵀ) V with V still rotated, as numerators,
// largest exponents and denominators that kv_merge.metal puts together. K and V of a token are read once, one behind the other, for all R
// queries of a threadgroup.
//
// A token's elements are shared by LANES lanes, RUNS runs of eight each; so a simdgroup has 32 / LANES tokens at a time, and goes through
// its own in fours, with one correction of its sums each. Exponents are of 2.
//
// q [rows, D] · records [KV heads, room, words] · levels [2^VB] · factor [1]: scale · log2 e · dims [tokens, room, tokens of a split,
// queries of a KV head] → parts [splits, rows, D + 2]: numerators, then the largest exponent and the denominator
// T: type of q · D · KB, VB: bits · R: queries of a threadgroup, of one KV head · WARPS: simdgroups. grid: splits; KV heads × ⌈queries / R⌉.
#include "metal/kv.h"

constexpr uint32_t RUNS = D > 256 ? D / 256 : 1, LANES = D / 8 / RUNS, SLOTS = 32 / LANES, FOUR = 4, E = 8 * RUNS;
constexpr uint32_t AFFINE = D * KB / 32, VALUES = AFFINE + D / 32, SCALES = VALUES + D * VB / 32, WORDS = SCALES + D / 64;
threadgroup float table[1 << VB];
threadgroup float sums[WARPS * R * (D + 2)];

const uint32_t tokens = dims[0], room = dims[1], split_tokens = dims[2], queries = dims[3];
const uint32_t lane = thread_index_in_simdgroup, warp = simdgroup_index_in_threadgroup, thread_index = thread_index_in_threadgroup;
const uint32_t split = threadgroup_position_in_grid.x, pieces = (queries + R - 1) / R;
const uint32_t head = threadgroup_position_in_grid.y / pieces, piece = threadgroup_position_in_grid.y % pieces;
const uint32_t slot = lane / LANES, place = lane % LANES;
const uint32_t begin = split * split_tokens, end = min(begin + split_tokens, tokens);
const uint32_t first_row = head * queries + piece * R, rows_here = min(uint32_t(R), queries - piece * R);

for (uint32_t i = thread_index; i < 1 << VB; i += WARPS * 32) table[i] = levels[i];
threadgroup_barrier(mem_flags::mem_threadgroup);

float query[R][E], query_sum[R], numerator[R][E], largest[R], denominator[R];
TQ_UNROLL for (uint32_t r = 0; r < R; ++r) {
  const uint32_t row = first_row + min(r, rows_here - 1);  // beyond the last: the last again, not written
  query_sum[r] = 0.0f;
  TQ_UNROLL for (uint32_t e = 0; e < E; ++e) {
    query[r][e] = float(q[row * D + place * E + e]) * factor[0];
    query_sum[r] += query[r][e];
    numerator[r][e] = 0.0f;
  }
  largest[r] = TQ_KV_NOTHING;
  denominator[r] = 0.0f;
}

// All lanes make as many rounds: they meet in shuffles.
for (uint32_t base = begin + warp * SLOTS; base < end; base += FOUR * WARPS * SLOTS) {
  float score[FOUR][R];
  uint32_t at[FOUR];
  TQ_UNROLL for (uint32_t j = 0; j < FOUR; ++j) {
    const uint32_t token = min(base + slot + j * WARPS * SLOTS, tokens - 1);  // beyond the last: read, and given no weight
    at[j] = (head * room + token) * WORDS;
    const uint32_t affine = records[at[j] + AFFINE + place * E / 32];
    TQ_UNROLL for (uint32_t r = 0; r < R; ++r) score[j][r] = 0.0f;
    TQ_UNROLL for (uint32_t n = 0; n < RUNS; ++n) {
      const TqEight eight = tq_kv_load(records + at[j], place * RUNS + n, KB);
      TQ_UNROLL for (uint32_t i = 0; i < 8; ++i) {
        const float code = tq_kv_key(tq_kv_code(eight, i, KB), KB);
        TQ_UNROLL for (uint32_t r = 0; r < R; ++r) score[j][r] += query[r][8 * n + i] * code;
      }
    }
    TQ_UNROLL for (uint32_t r = 0; r < R; ++r) score[j][r] = (score[j][r] + tq_high_half(affine) * query_sum[r]) * tq_low_half(affine);
  }
  TQ_UNROLL for (uint32_t step = 1; step < LANES; step *= 2)
    TQ_UNROLL for (uint32_t j = 0; j < FOUR; ++j)
      TQ_UNROLL for (uint32_t r = 0; r < R; ++r) score[j][r] += simd_shuffle_xor(score[j][r], step);

  TQ_UNROLL for (uint32_t r = 0; r < R; ++r) {
    float top = largest[r];
    TQ_UNROLL for (uint32_t j = 0; j < FOUR; ++j)
      if (base + slot + j * WARPS * SLOTS < end) top = max(top, score[j][r]);
    const float keep = metal::precise::exp2(largest[r] - top);
    largest[r] = top;
    denominator[r] *= keep;
    TQ_UNROLL for (uint32_t e = 0; e < E; ++e) numerator[r][e] *= keep;
    TQ_UNROLL for (uint32_t j = 0; j < FOUR; ++j) {
      const bool is_here = base + slot + j * WARPS * SLOTS < end;
      score[j][r] = is_here ? metal::precise::exp2(score[j][r] - top) : 0.0f;
      denominator[r] += score[j][r];
    }
  }
  TQ_UNROLL for (uint32_t j = 0; j < FOUR; ++j) {
    const uint32_t group = place * E / 32, scales = records[at[j] + SCALES + group / 2];
    const float scale = group % 2 == 0 ? tq_low_half(scales) : tq_high_half(scales);
    TQ_UNROLL for (uint32_t n = 0; n < RUNS; ++n) {
      const TqEight eight = tq_kv_load(records + at[j] + VALUES, place * RUNS + n, VB);
      TQ_UNROLL for (uint32_t i = 0; i < 8; ++i) {
        const float value = table[tq_kv_code(eight, i, VB)] * scale;
        TQ_UNROLL for (uint32_t r = 0; r < R; ++r) numerator[r][8 * n + i] += score[j][r] * value;
      }
    }
  }
}

// Slots of a simdgroup, then simdgroups.
TQ_UNROLL for (uint32_t r = 0; r < R; ++r) {
  TQ_UNROLL for (uint32_t step = LANES; step < 32; step *= 2) {
    const float other = simd_shuffle_xor(largest[r], step), top = max(largest[r], other);
    const float mine = metal::precise::exp2(largest[r] - top), its = metal::precise::exp2(other - top);
    denominator[r] = denominator[r] * mine + simd_shuffle_xor(denominator[r], step) * its;
    TQ_UNROLL for (uint32_t e = 0; e < E; ++e) numerator[r][e] = numerator[r][e] * mine + simd_shuffle_xor(numerator[r][e], step) * its;
    largest[r] = top;
  }
  if (slot == 0) {
    const uint32_t line = (warp * R + r) * (D + 2);
    TQ_UNROLL for (uint32_t e = 0; e < E; ++e) sums[line + place * E + e] = numerator[r][e];
    if (place == 0) {
      sums[line + D] = largest[r];
      sums[line + D + 1] = denominator[r];
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const uint32_t rows = dims[4];
for (uint32_t i = thread_index; i < rows_here * (D + 2); i += WARPS * 32) {
  const uint32_t r = i / (D + 2), e = i % (D + 2);
  float top = TQ_KV_NOTHING, total = 0.0f;
  for (uint32_t w = 0; w < WARPS; ++w) top = max(top, float(sums[(w * R + r) * (D + 2) + D]));
  for (uint32_t w = 0; w < WARPS; ++w) {
    const uint32_t line = (w * R + r) * (D + 2);
    total += float(sums[line + e]) * metal::precise::exp2(float(sums[line + D]) - top);
  }
  parts[(split * rows + first_row + r) * (D + 2) + e] = e == D ? top : total;
}
