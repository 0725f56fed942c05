// Viterbi steps with NEON: 4 suffixes per vector.
#include <arm_neon.h>

#include "cpu/viterbi.h"

namespace {
struct Neon {
  using reg = float32x4_t;
  using cost = float;
  static constexpr int width = 4;
  static reg set1(float v) { return vdupq_n_f32(v); }
  static reg load(const float *p) { return vld1q_f32(p); }
  static reg level(const float *p) { return load(p); }
  static void store(float *p, reg v) { vst1q_f32(p, v); }
  static reg sub(reg a, reg b) { return vsubq_f32(a, b); }
  static reg fma(reg a, reg b, reg c) { return vfmaq_f32(c, a, b); }
  static reg min(reg a, reg b) { return vminq_f32(a, b); }
  static float lowest(reg v) { return vminvq_f32(v); }
  // Lane i gets p[i >> K]: 2^K neighbouring suffixes share a predecessor.
  template <int K> static reg spread(const float *p) {
    if constexpr (K >= 2) return vld1q_dup_f32(p);
    const float32x2_t two = vld1_f32(p);
    return vcombine_f32(vdup_lane_f32(two, 0), vdup_lane_f32(two, 1));
  }
};
#include "cpu/viterbi.inl"
}  // namespace

tq::EncodeBlock tq::encode_block_neon(int bits, int window) { return pick<Neon>(bits, window); }
