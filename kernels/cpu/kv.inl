// The inner loops of kv.cpp, compiled once for each instruction set in a namespace of its own. Sums have one order, whatever the vectors: sixteen
// partial sums, and no contraction of products (-ffp-contract=off).

template <int BITS> void numbers_of(const uint32_t *part, size_t d, float *to) {  // codes of keys as numbers
  if (BITS == 8) {
    const int8_t *codes = reinterpret_cast<const int8_t *>(part);
    for (size_t i = 0; i < d; i++) to[i] = codes[i];
    return;
  }
  for (size_t run = 0; run < d / 8; run++) {
    const uint32_t word = tq_kv_word(run, BITS);
    const TqEight eight = tq_kv_eight(part[word], part[word + 1], tq_kv_shift(run, BITS));
    for (uint32_t i = 0; i < 8; i++) to[8 * run + i] = tq_kv_key(tq_kv_code(eight, i, BITS), BITS);
  }
}

template <int BITS> void levels_of(const uint32_t *part, size_t d, const float *levels, float *to) {
  for (size_t run = 0; run < d / 8; run++) {
    const uint32_t word = tq_kv_word(run, BITS);
    const TqEight eight = tq_kv_eight(part[word], part[word + 1], tq_kv_shift(run, BITS));
    for (uint32_t i = 0; i < 8; i++) to[8 * run + i] = levels[tq_kv_code(eight, i, BITS)];
  }
}

inline void read_key(const Layout &at, const uint32_t *record, float *key) {
  switch (at.k_bits) {
    case 2: numbers_of<2>(record, at.d, key); break;
    case 4: numbers_of<4>(record, at.d, key); break;
    case 5: numbers_of<5>(record, at.d, key); break;
    default: numbers_of<8>(record, at.d, key);
  }
  for (size_t g = 0; g < at.d / kGroup; g++) {
    const uint32_t word = record[at.affine + g];
    const float scale = from_half(word & 0xFFFF), zero = from_half(word >> 16);
    for (size_t i = 0; i < kGroup; i++) key[g * kGroup + i] = (key[g * kGroup + i] + zero) * scale;
  }
}

inline void read_value(const Layout &at, const uint32_t *record, const float *levels, float *value) {
  const uint32_t *part = record + at.values;
  switch (at.v_bits) {
    case 2: levels_of<2>(part, at.d, levels, value); break;
    case 3: levels_of<3>(part, at.d, levels, value); break;
    case 4: levels_of<4>(part, at.d, levels, value); break;
    case 5: levels_of<5>(part, at.d, levels, value); break;
    default: levels_of<8>(part, at.d, levels, value);
  }
  for (size_t g = 0; g < at.d / kGroup; g++) {
    const float scale = from_half(record[at.scales + g / 2] >> (g % 2 ? 16 : 0) & 0xFFFF);
    for (size_t i = 0; i < kGroup; i++) value[g * kGroup + i] *= scale;
  }
}

inline float dot(const float *a, const float *b, size_t d) {
  float sums[16] = {};
  for (size_t i = 0; i < d; i += 16)
    for (size_t l = 0; l < 16; l++) sums[l] += a[i + l] * b[i + l];
  for (size_t half = 8; half; half /= 2)
    for (size_t l = 0; l < half; l++) sums[l] += sums[l + half];
  return sums[0];
}

// Tokens [first, last) of one head, for `queries` rows of q: numerators [queries, d], then largest scores and denominators [queries] each.
void attend_chunk(const Layout &at, const uint32_t *records, size_t first, size_t last, const float *q, size_t queries, float scale, const float *levels, float *numerators, float *largest,
                  float *denominators, float *scratch) {
  float *row = scratch, *scores = scratch + at.d;  // scores [tokens, queries]
  for (size_t r = 0; r < queries; r++) largest[r] = -INFINITY, denominators[r] = 0.0f;
  for (size_t t = first; t < last; t++) {
    read_key(at, records + t * at.words, row);
    for (size_t r = 0; r < queries; r++) {
      const float score = dot(q + r * at.d, row, at.d) * scale;
      scores[(t - first) * queries + r] = score;
      if (!(score <= largest[r])) largest[r] = score;  // what is no number stays, and shows
    }
  }
  for (size_t t = first; t < last; t++) {
    read_value(at, records + t * at.words, levels, row);
    for (size_t r = 0; r < queries; r++) {
      const float weight = std::exp(scores[(t - first) * queries + r] - largest[r]);
      denominators[r] += weight;
      float *sum = numerators + r * at.d;
      for (size_t i = 0; i < at.d; i++) sum[i] += weight * row[i];
    }
  }
}

// y = H y in butterflies of 1, 2, 4 ... neighbours.
inline void butterflies(float *y, size_t d) {
  for (size_t w = 1; w < d; w *= 2)
    for (size_t i = 0; i < d; i += 2 * w)
      for (size_t j = i; j < i + w; j++) {
        const float a = y[j], b = y[j + w];
        y[j] = a + b;
        y[j + w] = a - b;
      }
}

// Records of tokens [first, last), docs/formats/kv.md.
void encode(const Layout &at, const float *keys, const float *values, size_t first, size_t last, const float *signs, const float *boundaries, uint32_t *records) {
  const float root = (float)(1.0 / std::sqrt((double)at.d));
  const float least = at.k_bits == 8 ? -127.0f : 0.0f, most = at.k_bits == 8 ? 127.0f : (float)((1 << at.k_bits) - 1), steps = at.k_bits == 8 ? 254.0f : most;
  float y[kMostDim];
  for (size_t t = first; t < last; t++) {
    uint32_t *record = records + t * at.words;
    for (size_t i = 0; i < at.words; i++) record[i] = 0;
    const auto put = [&](size_t part, size_t i, int bits, uint32_t code) {
      const size_t bit = i * bits, word = part + bit / 32, shift = bit % 32;
      record[word] |= code << shift;
      if (shift + bits > 32) record[word + 1] |= code >> (32 - shift);
    };
    for (size_t g = 0; g < at.d / kGroup; g++) {
      const float *x = keys + t * at.d + g * kGroup;
      float low = x[0], high = x[0];
      for (size_t i = 1; i < kGroup; i++) low = x[i] < low ? x[i] : low, high = x[i] > high ? x[i] : high;
      const float largest = std::fabs(low) > std::fabs(high) ? std::fabs(low) : std::fabs(high);
      const float spacing = as_float(as_bits(largest) & 0x7F800000u) * 0x1p-10f, floor = spacing > 0x1p-24f ? spacing : 0x1p-24f;
      float scale = (high - low) / steps;
      scale = scale > floor ? scale : floor;
      const uint32_t stored = to_half(scale < 65504.0f ? scale : 65504.0f);
      scale = from_half(stored);
      const float zero = (at.k_bits == 8 ? std::rint((high + low) / (2.0f * scale)) : std::rint(low / scale)) + 0.0f;  // no negative zero
      record[at.affine + g] = stored | to_half(zero) << 16;
      for (size_t i = 0; i < kGroup; i++) {
        float code = std::rint(x[i] / scale - zero);
        code = code < least ? least : code > most ? most : code;
        put(0, g * kGroup + i, at.k_bits, (uint32_t)(int)code & ((1u << at.k_bits) - 1u));
      }
    }
    for (size_t i = 0; i < at.d; i++) y[i] = values[t * at.d + i] * signs[i];
    butterflies(y, at.d);
    for (size_t i = 0; i < at.d; i++) y[i] *= root;
    for (size_t g = 0; g < at.d / kGroup; g++) {
      const float *x = y + g * kGroup;
      float sums[kGroup];
      for (size_t i = 0; i < kGroup; i++) sums[i] = x[i] * x[i];
      for (size_t half = kGroup / 2; half; half /= 2)
        for (size_t i = 0; i < half; i++) sums[i] += sums[i + half];
      const float rms = std::sqrt(sums[0] * 0x1p-5f);
      const uint32_t stored = to_half(rms < 65504.0f ? rms : 65504.0f);
      record[at.scales + g / 2] |= stored << (g % 2 ? 16 : 0);
      const float scale = from_half(stored);
      for (size_t i = 0; i < kGroup; i++) {
        const float normal = scale == 0.0f ? 0.0f : x[i] / scale;
        uint32_t cell = 0;  // boundaries strictly below
        for (int bit = at.v_bits - 1; bit >= 0; bit--) {
          const uint32_t upper = cell + (1u << bit);
          cell = normal > boundaries[upper - 1] ? upper : cell;
        }
        put(at.values, g * kGroup + i, at.v_bits, cell);
      }
    }
  }
}

void decode(const Layout &at, const uint32_t *records, size_t first, size_t last, const float *levels, float *keys, float *rotated) {
  for (size_t t = first; t < last; t++) {
    read_key(at, records + t * at.words, keys + t * at.d);
    read_value(at, records + t * at.words, levels, rotated + t * at.d);
  }
}

void unrotate(const float *signs, size_t d, float *y) {
  const float root = (float)(1.0 / std::sqrt((double)d));
  butterflies(y, d);
  for (size_t i = 0; i < d; i++) y[i] = y[i] * root * signs[i];
}
