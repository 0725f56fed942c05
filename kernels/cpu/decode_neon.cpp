// Four weights at a time with NEON: the windows of lanes i = 0..3 lie within 32 bits of the byte that holds the last one's first bit.
#include "cpu/decode.h"

#include <arm_neon.h>

#include <cstring>

#include "common/trellis_decode.h"

namespace {
#include "cpu/decode.inl"

struct Neon {
  using reg = float32x4_t;
  static constexpr int lanes = 4, rows = 16;
  static reg zero() { return vdupq_n_f32(0); }
  static reg broadcast(float v) { return vdupq_n_f32(v); }
  static reg load(const float *p) { return vld1q_f32(p); }
  static void store(float *p, reg v) { vst1q_f32(p, v); }
  static reg fma(reg a, reg b, reg c) { return vfmaq_f32(c, a, b); }
  static float sum(reg v) { return vaddvq_f32(v); }

  template <tq::Code C, int K> struct Group {
    int32x4_t shift[2];  // to the right, as NEON has it: negative; for parts that begin at a byte, and in the middle of one
    uint32x4_t mask;
    const float *table;
    explicit Group(const tq::Packed &p) : mask(vdupq_n_u32((1u << p.window) - 1)), table(p.table) {
      for (int odd = 0; odd < 2; odd++) {
        int32_t by[4];
        for (int i = 0; i < 4; i++) by[i] = -((3 - i) * K + odd * (4 * K & 7));
        shift[odd] = vld1q_s32(by);
      }
    }
    reg levels(const uint8_t *at, int part) const {
      const int bit = (3 - part) * 4 * K;
      uint32_t word;
      std::memcpy(&word, at + (bit >> 3), 4);
      const uint32x4_t state = vandq_u32(vshlq_u32(vdupq_n_u32(word), shift[(3 - part) & 1]), mask);
      if constexpr (C == tq::Code::table) {
        const float four[4] = {table[vgetq_lane_u32(state, 0)], table[vgetq_lane_u32(state, 1)], table[vgetq_lane_u32(state, 2)], table[vgetq_lane_u32(state, 3)]};
        return vld1q_f32(four);
      }
      uint32x4_t hash = vmulq_u32(state, vdupq_n_u32(C == tq::Code::mul1 ? TQ_MUL1_MULTIPLIER : TQ_1MAD_MULTIPLIER));
      if constexpr (C == tq::Code::one_mad) hash = vaddq_u32(hash, vdupq_n_u32(TQ_1MAD_ADDEND));
      const uint32x4_t sum = vpaddlq_u16(vpaddlq_u8(vreinterpretq_u8_u32(hash)));
      return vcvtq_f32_s32(vsubq_s32(vreinterpretq_s32_u32(sum), vdupq_n_s32(TQ_BYTE_SUM_MEAN)));
    }
  };
};
#include "cpu/decode_groups.inl"
}  // namespace

const tq::Kernels tq::kernels_neon = {"neon", expand<Decoder<Neon>>, reduce<Decoder<Neon>>, scatter<Decoder<Neon>>, product<Neon>};
