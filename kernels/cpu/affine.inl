// One instruction set's affine quantizer; affine.cpp includes this once per set with TQ_VECTOR_BYTES defined.
typedef float Vec __attribute__((vector_size(TQ_VECTOR_BYTES)));
typedef std::int32_t Ints __attribute__((vector_size(TQ_VECTOR_BYTES)));
constexpr int WIDTH = TQ_VECTOR_BYTES / sizeof(float);

inline Vec load(const float *x) {
  Vec v;
  std::memcpy(&v, x, sizeof v);
  return v;
}

struct Range {
  float low, high;
};

inline Range range_of(const float *x, int group) {
  Vec low = load(x), high = low;
  for (int i = WIDTH; i < group; i += WIDTH) {
    const Vec v = load(x + i);
    low = v < low ? v : low;
    high = v > high ? v : high;
  }
  Range r{low[0], high[0]};
  for (int i = 1; i < WIDTH; ++i) {
    r.low = low[i] < r.low ? low[i] : r.low;
    r.high = high[i] > r.high ? high[i] : r.high;
  }
  return r;
}

// The lanes lose the order of +0 and -0; MLX keeps the first, and one bit stores it as the bias.
inline float first_zero(const float *x, int group) {
  for (int i = 0; i < group; ++i)
    if (x[i] == 0.0f) return x[i];
  return 0.0f;
}

inline void round_group(const float *x, int group, float scale, float bias, float levels, std::int32_t *codes) {
  // Adding 2^23 to a value in [0, 255] rounds it to an integer, half to even, which then is the low byte of the float.
  const float magic = 8388608.0f;
  for (int i = 0; i < group; i += WIDTH) {
    Vec t = (load(x + i) - bias) / scale;
    t = t > 0.0f ? t : Vec{};
    t = t < levels ? t : Vec{} + levels;
    t = t + magic;
    Ints bits;
    std::memcpy(&bits, &t, sizeof bits);
    bits &= 0xFF;
    std::memcpy(codes + i, &bits, sizeof bits);
  }
}

template <typename T>
void quantize_groups(const T *weight, std::uint8_t *words, float *scales, float *biases, const Spec &spec,
                     std::size_t first, std::size_t last) {
  alignas(64) float x[MAX_GROUP];
  alignas(64) std::int32_t codes[MAX_GROUP];
  const float levels = static_cast<float>((1 << spec.bits) - 1);
  const std::size_t group_bytes = static_cast<std::size_t>(spec.group) * spec.bits / 8;
  for (std::size_t g = first; g < last; ++g) {
    widen(weight + g * spec.group, spec.group, x);
    Range range = range_of(x, spec.group);
    if (range.low == 0.0f) range.low = first_zero(x, spec.group);
    const Grid grid = grid_of(range.low, range.high, levels);
    round_group(x, spec.group, grid.scale, grid.bias, levels, codes);
    pack_group(codes, spec.group, spec.bits, words + g * group_bytes);
    scales[g] = grid.scale;
    biases[g] = grid.bias;
  }
}
