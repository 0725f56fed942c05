// The one decode rule of packed KV records (docs/formats/kv.md), in the C subset that C++, CUDA and Metal share.
//
// A record is a row of little-endian 32-bit words: codes of the key; a word a group of 32 elements with the key's scale (low half) and zero
// (high half), float16 both; codes of the value; the value's scales, two groups a word. Codes are bitstreams. Eight codes of b bits are b
// bytes, whatever b, so an aligned run of eight lies in two neighbouring words.
//
// A backend defines TQ_FN (function qualifiers) before including this file, and provides uint32_t. Nothing here names a backend.
#ifndef TQ_KV_DECODE_H
#define TQ_KV_DECODE_H

#ifndef TQ_FN
#define TQ_FN static inline
#endif

#define TQ_KV_GROUP 32u

// Word offsets of the parts of a record, d elements a key and a value.
TQ_FN uint32_t tq_kv_affine_at(uint32_t d, uint32_t k_bits) { return d * k_bits / 32u; }
TQ_FN uint32_t tq_kv_values_at(uint32_t d, uint32_t k_bits) { return tq_kv_affine_at(d, k_bits) + d / TQ_KV_GROUP; }
TQ_FN uint32_t tq_kv_scales_at(uint32_t d, uint32_t k_bits, uint32_t v_bits) { return tq_kv_values_at(d, k_bits) + d * v_bits / 32u; }
TQ_FN uint32_t tq_kv_words(uint32_t d, uint32_t k_bits, uint32_t v_bits) { return tq_kv_scales_at(d, k_bits, v_bits) + d / (2u * TQ_KV_GROUP); }

// Codes 8r .. 8r+7 of a bitstream: its word tq_kv_word(r), and the one after it, shifted by tq_kv_shift(r). That second word is read but for
// nothing where the first has it all; it lies in the record, as every bitstream is followed by scales.
typedef struct {
  uint32_t low, high;
} TqEight;

TQ_FN uint32_t tq_kv_word(uint32_t run, uint32_t bits) { return run * bits / 4u; }
TQ_FN uint32_t tq_kv_shift(uint32_t run, uint32_t bits) { return run * bits % 4u * 8u; }
TQ_FN TqEight tq_kv_eight(uint32_t first, uint32_t second, uint32_t shift) {
  TqEight eight;
  // (second << 1) << (31 - shift) is second << (32 - shift), defined for shift = 0 too.
  eight.low = (first >> shift) | ((second << 1) << (31u - shift));
  eight.high = second >> shift;
  return eight;
}

// Code i of eight; with i and bits known to the compiler: one shift and one mask, and rarely a second shift.
TQ_FN uint32_t tq_kv_code(TqEight eight, uint32_t i, uint32_t bits) {
  const uint32_t at = i * bits;
  const uint32_t found = at >= 32u ? eight.high >> (at & 31u) : at + bits <= 32u ? eight.low >> at : (eight.low >> (at & 31u)) | (eight.high << ((32u - at) & 31u));
  return found & (bits == 32u ? ~0u : (1u << bits) - 1u);
}

// A key's code as a number: 8 bits are two's complement. TQ_AS_FLOAT(x), the float whose bits are x, spares a conversion: the code becomes
// the mantissa of 2^23 + code. Exact either way.
TQ_FN float tq_kv_key(uint32_t code, uint32_t bits) {
  const uint32_t biased = bits == 8u ? code ^ 0x80u : code;
  const float bias = bits == 8u ? 128.0f : 0.0f;
#ifdef TQ_AS_FLOAT
  return TQ_AS_FLOAT(0x4B000000u | biased) - (8388608.0f + bias);
#else
  return (float)(int)biased - bias;
#endif
}

#endif
