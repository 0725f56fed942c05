// Keys and values to records (docs/formats/kv.md), to the byte: each operation is one rounding, in the order of tqtool/kv/codec.py.
//
// A simdgroup has one token of one head; element 32 i + lane of it in register i, so that a group of 32 is one register of all lanes.
//
// keys, values [rows, D] · signs [D] · edges [2^VB - 1]: boundaries between levels · root [1]: 1/√D → records [rows, words]
// D · KB, VB: bits. grid: 32 lanes for every row.
#include "metal/kv.h"

constexpr int N = D / 32;
constexpr uint32_t AFFINE = D * KB / 32, VALUES = AFFINE + D / 32, SCALES = VALUES + D * VB / 32, WORDS = SCALES + D / 64;
threadgroup uint32_t codes[2 * D];

const uint32_t row = threadgroup_position_in_grid.x, lane = thread_index_in_simdgroup;
const float steps = KB == 8 ? 254.0f : float((1 << KB) - 1), least = KB == 8 ? -127.0f : 0.0f, most = KB == 8 ? 127.0f : steps;
TQ_UNROLL for (int i = 0; i < N; ++i) {
  const float x = float(keys[row * D + 32 * i + lane]);
  const float low = simd_min(x), high = -simd_min(-x);
  const float largest = max(low < 0.0f ? -low : low, high < 0.0f ? -high : high);
  const float spacing = as_type<float>(as_type<uint32_t>(largest) & 0x7F800000u) * 0.0009765625f;
  const float wide = max((high - low) / steps, max(spacing, TQ_SMALLEST_HALF));
  const half stored = half(min(wide, TQ_LARGEST_HALF));
  const float scale = float(stored);
  const float zero = (KB == 8 ? metal::rint((high + low) / (2.0f * scale)) : metal::rint(low / scale)) + 0.0f;  // no negative zero
  const float code = min(max(metal::rint(x / scale - zero), least), most);
  codes[32 * i + lane] = uint32_t(int(code)) & ((1u << KB) - 1u);
  if (lane == 0) records[row * WORDS + AFFINE + i] = uint32_t(as_type<uint16_t>(stored)) | uint32_t(as_type<uint16_t>(half(zero))) << 16;
}

float y[N];
TQ_UNROLL for (int i = 0; i < N; ++i) y[i] = float(values[row * D + 32 * i + lane]) * signs[32 * i + lane];
tq_kv_hadamard<N>(lane, y);
uint32_t before = 0;
TQ_UNROLL for (int i = 0; i < N; ++i) {
  const float value = TQ_PRODUCT(y[i], root[0]);
  float sum = TQ_PRODUCT(value, value);
  TQ_UNROLL for (uint32_t step = 16; step > 0; step /= 2) sum += simd_shuffle_xor(sum, step);
  const half stored = half(min(metal::precise::sqrt(sum * 0.03125f), TQ_LARGEST_HALF));
  const float scale = float(stored), normal = scale == 0.0f ? 0.0f : value / scale;
  uint32_t cell = 0;  // boundaries strictly below
  TQ_UNROLL for (int bit = VB - 1; bit >= 0; --bit) {
    const uint32_t upper = cell + (1u << bit);
    if (normal > edges[upper - 1]) cell = upper;
  }
  codes[D + 32 * i + lane] = cell;
  const uint32_t bits = as_type<uint16_t>(stored);
  if (i % 2 == 1 && lane == 0) records[row * WORDS + SCALES + i / 2] = before | bits << 16;
  before = bits;
}

threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint32_t w = lane; w < D * (KB + VB) / 32; w += 32) {
  // Word `word` of a group of one of the two bitstreams: all its codes that have a bit there.
  const bool is_key = w < AFFINE;
  const uint32_t bits = is_key ? KB : VB, at = is_key ? w : w - AFFINE, word = at % bits;
  const uint32_t group = (is_key ? 0 : D) + at / bits * 32;
  uint32_t packed = 0;
  for (uint32_t e = 32 * word / bits; e < 32 && e * bits < 32 * word + 32; ++e) {
    const uint32_t code = codes[group + e];
    packed |= e * bits < 32 * word ? code >> (32 * word - e * bits) : code << (e * bits - 32 * word);
  }
  records[row * WORDS + (is_key ? at : VALUES + at)] = packed;
}
