// The one decode rule of the trellis format, versions 1 and 2 (docs/formats/trellis.md), in the C subset that C++, CUDA and Metal share.
//
// A block holds T symbols of k bits in T*k/32 little-endian 32-bit words; the symbol of step t lies at bit (T-1-t)*k. Time runs backwards
// so that the window of L bits which starts there, wrapping at the end of the block, IS the state of step t: any weight decodes
// alone, from two words, one shift and one mask.
//
// A backend defines TQ_FN (function qualifiers) and TQ_WORDS (type of a pointer to words) before including this file, and provides
// uint32_t. It may define TQ_SUM4(x), its fastest sum of the four bytes of x, and TQ_AS_FLOAT(x), the float whose bits are x. Nothing
// here names a backend.
#ifndef TQ_TRELLIS_DECODE_H
#define TQ_TRELLIS_DECODE_H

#include "common/constants.h"

#ifndef TQ_FN
#define TQ_FN static inline
#endif
#ifndef TQ_WORDS
#define TQ_WORDS const uint32_t *
#endif

// State of step t. words: the block's first word; n_words = T*k/32.
TQ_FN uint32_t tq_state(TQ_WORDS words, uint32_t n_words, uint32_t block, uint32_t t, uint32_t k, uint32_t window) {
  const uint32_t bit = (block - 1u - t) * k, word = bit >> 5, shift = bit & 31u;
  const uint32_t low = words[word], high = words[word + 1u == n_words ? 0u : word + 1u];
  // (high << 1) << (31 - shift) is high << (32 - shift), defined for shift = 0 too.
  return ((low >> shift) | ((high << 1) << (31u - shift))) & ((1u << window) - 1u);
}

// Eight steps t, t+1 .. t+7 at once, t a multiple of 8: their windows lie in two neighbouring words for every k = 1..4 and window <= 16,
// and the run of a lane always has the same shift. low: the 32 bits from the window of step t+7 on; high: those after them.
typedef struct {
  uint32_t low, high;
} TqRun;

TQ_FN uint32_t tq_run_bit(uint32_t block, uint32_t t, uint32_t k) { return (block - 8u - t) * k; }

// low, high: word number bit/32 of the block and the one after it (the block's first after its last); shift: bit mod 32.
TQ_FN TqRun tq_run(uint32_t low, uint32_t high, uint32_t shift) {
  TqRun run;
  run.low = (low >> shift) | ((high << 1) << (31u - shift));
  run.high = high >> shift;
  return run;
}

// State of step t+i. With i, k and window known to the compiler: one shift and one mask, and rarely a second shift.
TQ_FN uint32_t tq_run_state(TqRun run, uint32_t i, uint32_t k, uint32_t window) {
  const uint32_t shift = (7u - i) * k, bits = run.low >> shift;
  return (shift + window <= 32u ? bits : bits | (run.high << ((32u - shift) & 31u))) & ((1u << window) - 1u);
}

TQ_FN uint32_t tq_sum4(uint32_t x) {
#ifdef TQ_SUM4
  return TQ_SUM4(x);
#else
  const uint32_t pairs = (x & 0x00FF00FFu) + ((x >> 8) & 0x00FF00FFu);
  return (pairs & 0xFFFFu) + (pairs >> 16);
#endif
}

TQ_FN uint32_t tq_hash_mul1(uint32_t state) { return state * TQ_MUL1_MULTIPLIER; }
TQ_FN uint32_t tq_hash_1mad(uint32_t state) { return state * TQ_1MAD_MULTIPLIER + TQ_1MAD_ADDEND; }

// Integer level of a state; the value is level * TQ_MUL1_INVERSE_UNIT (1mad: TQ_1MAD_INVERSE_UNIT), rounded to float32, times the row scale.
TQ_FN int tq_level_mul1(uint32_t state) { return (int)tq_sum4(tq_hash_mul1(state)) - TQ_BYTE_SUM_MEAN; }
TQ_FN int tq_level_1mad(uint32_t state) { return (int)tq_sum4(tq_hash_1mad(state)) - TQ_BYTE_SUM_MEAN; }

#ifdef TQ_AS_FLOAT
// The level of a byte sum without an integer-to-float conversion: the sum becomes the mantissa of 2^23 + sum. Exact.
TQ_FN float tq_level_of_sum(uint32_t sum) { return TQ_AS_FLOAT(0x4B000000u | sum) - (8388608.0f + (float)TQ_BYTE_SUM_MEAN); }
#endif

// 3inst: the two halves of this word are IEEE half floats; the value is their float32 sum times TQ_3INST_INVERSE_RMS.
TQ_FN uint32_t tq_halves_3inst(uint32_t state) { return ((state * TQ_3INST_MULTIPLIER + TQ_3INST_ADDEND) & TQ_3INST_MASK) ^ TQ_3INST_XOR; }

#endif
