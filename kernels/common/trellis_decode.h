// The one decode rule of the trellis format, versions 1 and 2 (docs/formats/trellis.md), in the C subset that C++, CUDA and Metal share.
//
// A block holds T symbols of k bits in T*k/32 little-endian 32-bit words; the symbol of step t lies at bit (T-1-t)*k. Time runs backwards
// so that the window of L bits which starts there, wrapping at the end of the block, IS the state of step t: any weight decodes
// alone, from two words, one shift and one mask.
//
// A backend defines TQ_FN (function qualifiers) and TQ_WORDS (type of a pointer to words) before including this file, and provides
// uint32_t. Nothing here names a backend.
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

TQ_FN int tq_byte_sum(uint32_t x) { return (int)((x & 255u) + ((x >> 8) & 255u) + ((x >> 16) & 255u) + (x >> 24)) - TQ_BYTE_SUM_MEAN; }

// Integer level of a state; the value is level * TQ_MUL1_INVERSE_UNIT (1mad: TQ_1MAD_INVERSE_UNIT), rounded to float32, times the row scale.
TQ_FN int tq_level_mul1(uint32_t state) { return tq_byte_sum(state * TQ_MUL1_MULTIPLIER); }
TQ_FN int tq_level_1mad(uint32_t state) { return tq_byte_sum(state * TQ_1MAD_MULTIPLIER + TQ_1MAD_ADDEND); }

// 3inst: the two halves of this word are IEEE half floats; the value is their float32 sum times TQ_3INST_INVERSE_RMS.
TQ_FN uint32_t tq_halves_3inst(uint32_t state) { return ((state * TQ_3INST_MULTIPLIER + TQ_3INST_ADDEND) & TQ_3INST_MASK) ^ TQ_3INST_XOR; }

#endif
