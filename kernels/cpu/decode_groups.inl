// Products of packed matrices by groups of sixteen steps, which a vector unit decodes and multiplies at once, without a buffer in between.
//
// Included after decode.inl, inside an anonymous namespace of each instruction set's source, which defines V:
//   V::reg, V::lanes; zero(), broadcast(float), load(const float *), store(float *, reg), fma(a, b, c) = a b + c, sum(reg)
//   V::Group<C, K>(p): group.levels(at, part), the levels of lanes `part` of a group whose first byte is at `at`. It may read 8 + K bytes.
//
// A group is 2 K whole bytes; those of a block lie in reverse, group g at byte (15 - g) * 2K. Sums run along the columns (of a tile, of a row) or down the
// rows (axis 0) in one fixed order, so nothing depends on how the work is shared out.

#define TQ_UNROLL _Pragma("GCC unroll 16")
constexpr int kGroup = 16;
constexpr size_t kPanel = 4096;

typedef long long Pair __attribute__((vector_size(16)));

// The groups of one block. Windows of the first groups wrap round to the block's first bytes: these are read from a copy that goes on there.
template <int K> struct Block {
  static constexpr int kBytes = 32 * K, kWrapped = K == 1 ? 4 : K == 2 ? 2 : 1;
  const uint8_t *bytes;
  alignas(16) uint8_t seam[16];

  explicit Block(const tq::Packed &p, size_t number) : bytes((const uint8_t *)p.words + number * kBytes) {
    Pair around;
    std::memcpy(&around[0], bytes + kBytes - 8, 8);
    std::memcpy(&around[1], bytes, 8);
    std::memcpy(seam, &around, 16);
  }
  const uint8_t *group(int g) const { return g < kWrapped ? seam + ((15 - g) * 2 * K - (kBytes - 8)) : bytes + (15 - g) * 2 * K; }
};

// Calls sink(group bytes, column) for `columns` columns of the stream from weight `first` on; both are multiples of 16.
template <int K, class Sink> inline void walk_groups(const tq::Packed &p, size_t first, size_t columns, Sink sink) {
  for (size_t c = 0; c < columns;) {
    const Block<K> block(p, (first + c) / 256);
    for (int g = (first + c) % 256 / kGroup; g < 16 && c < columns; g++, c += kGroup) sink(block.group(g), c);
  }
}

// Lines of x or y that a kernel has at once; the last ones may repeat: what they give is not used.
template <int M> struct Lines {
  float *at[M];
};

// Rows of squares: R rows of a square at a time, all squares of the row of squares.
template <class V, tq::Code C, int K, int M> void tile_product(const tq::Packed &p, size_t begin, size_t end, Lines<M> x, Lines<M> y) {
  constexpr int R = M == 1 ? V::rows : M == 2 ? V::rows / 2 : V::rows / 4, kParts = kGroup / V::lanes;
  const typename V::template Group<C, K> group(p);
  const size_t across = p.stride / kTile;
  for (size_t row = begin; row < end; row += kTile)
    for (int from = 0; from < kTile && row + from < end; from += R) {
      typename V::reg sums[R][M];
      TQ_UNROLL for (int r = 0; r < R; r++)
        TQ_UNROLL for (int i = 0; i < M; i++) sums[r][i] = V::zero();
      for (size_t s = 0; s < across; s++) {
        const Block<K> block(p, row / kTile * across + s);
        TQ_UNROLL for (int part = 0; part < kParts; part++) {
          typename V::reg in[M];
          TQ_UNROLL for (int i = 0; i < M; i++) in[i] = V::load(x.at[i] + s * kTile + part * V::lanes);
          TQ_UNROLL for (int r = 0; r < R; r++) {
            const typename V::reg levels = group.levels(block.group(from + r), part);
            TQ_UNROLL for (int i = 0; i < M; i++) sums[r][i] = V::fma(levels, in[i], sums[r][i]);
          }
        }
      }
      TQ_UNROLL for (int r = 0; r < R; r++)
        if (row + from + r < end)
          TQ_UNROLL for (int i = 0; i < M; i++) y.at[i][row + from + r] = V::sum(sums[r][i]) * p.scales[row + from + r];
    }
}

template <class V, tq::Code C, int K, int M> void row_product(const tq::Packed &p, size_t begin, size_t end, Lines<M> x, Lines<M> y) {
  constexpr int kParts = kGroup / V::lanes;
  const typename V::template Group<C, K> group(p);
  for (size_t row = begin; row < end; row++) {
    typename V::reg sums[M][kParts];
    for (int i = 0; i < M; i++)
      for (int part = 0; part < kParts; part++) sums[i][part] = V::zero();
    walk_groups<K>(p, row * p.stride, p.stride, [&](const uint8_t *at, size_t c) {
      for (int part = 0; part < kParts; part++) {
        const typename V::reg levels = group.levels(at, part);
        for (int i = 0; i < M; i++) sums[i][part] = V::fma(levels, V::load(x.at[i] + c + part * V::lanes), sums[i][part]);
      }
    });
    for (int i = 0; i < M; i++) {
      float sum = 0;
      for (int part = 0; part < kParts; part++) sum += V::sum(sums[i][part]);
      y.at[i][row] = sum * p.scales[row];
    }
  }
}

// Rows [begin, end) of axis 0, added to y: a panel of columns at a time, whose sums stay in the nearest cache.
template <class V, tq::Code C, int K, int M> void column_product(const tq::Packed &p, size_t begin, size_t end, Lines<M> x, Lines<M> y) {
  constexpr int kParts = kGroup / V::lanes;
  const typename V::template Group<C, K> group(p);
  for (size_t first = 0; first < p.stride; first += kPanel) {
    const size_t columns = p.stride - first < kPanel ? p.stride - first : kPanel;
    for (size_t row = begin; row < end; row++) {
      typename V::reg factor[M];
      for (int i = 0; i < M; i++) factor[i] = V::broadcast(x.at[i][row] * p.scales[row]);
      walk_groups<K>(p, row * p.stride + first, columns, [&](const uint8_t *at, size_t c) {
        TQ_UNROLL for (int part = 0; part < kParts; part++) {
          const typename V::reg levels = group.levels(at, part);
          TQ_UNROLL for (int i = 0; i < M; i++) {
            float *to = y.at[i] + first + c + part * V::lanes;
            V::store(to, V::fma(levels, factor[i], V::load(to)));
          }
        }
      });
    }
  }
}

template <class V, tq::Code C, int K, int M> void product_of(const tq::Packed &p, size_t begin, size_t end, const tq::Rows &x, const tq::Rows &y) {
  Lines<M> in, out;
  for (int i = 0; i < M; i++) in.at[i] = x.at[i], out.at[i] = y.at[i];
  if (p.axis == 0) return column_product<V, C, K, M>(p, begin, end, in, out);
  if (p.tile) return tile_product<V, C, K, M>(p, begin, end, in, out);
  row_product<V, C, K, M>(p, begin, end, in, out);
}

template <class V, tq::Code C, int K> void product_rows(const tq::Packed &p, size_t begin, size_t end, const tq::Rows &x, const tq::Rows &y) {
  if (x.count == 1) return product_of<V, C, K, 1>(p, begin, end, x, y);
  if (x.count == 2) return product_of<V, C, K, 2>(p, begin, end, x, y);
  product_of<V, C, K, 4>(p, begin, end, x, y);
}

template <class V, tq::Code C> void product_bits(const tq::Packed &p, size_t begin, size_t end, const tq::Rows &x, const tq::Rows &y) {
  switch (p.bits) {
    case 1: return product_rows<V, C, 1>(p, begin, end, x, y);
    case 2: return product_rows<V, C, 2>(p, begin, end, x, y);
    case 3: return product_rows<V, C, 3>(p, begin, end, x, y);
    case 4: return product_rows<V, C, 4>(p, begin, end, x, y);
  }
}

template <class V> void product(const tq::Packed &p, size_t begin, size_t end, const tq::Rows &x, const tq::Rows &y) {
  switch (p.code) {
    case tq::Code::mul1: return product_bits<V, tq::Code::mul1>(p, begin, end, x, y);
    case tq::Code::one_mad: return product_bits<V, tq::Code::one_mad>(p, begin, end, x, y);
    case tq::Code::table: return product_bits<V, tq::Code::table>(p, begin, end, x, y);
  }
}

// All levels of one block, for decode.inl.
template <class V> struct Decoder {
  template <tq::Code C, int K> static void groups(const tq::Packed &p, const uint32_t *words, float *levels) {
    const typename V::template Group<C, K> group(p);
    const Block<K> block(p, (size_t)(words - p.words) / (8 * K));
    for (int g = 0; g < 16; g++)
      for (int part = 0; part < kGroup / V::lanes; part++) V::store(levels + g * kGroup + part * V::lanes, group.levels(block.group(g), part));
  }
  template <tq::Code C> static void bits(const tq::Packed &p, const uint32_t *words, float *levels) {
    switch (p.bits) {
      case 1: return groups<C, 1>(p, words, levels);
      case 2: return groups<C, 2>(p, words, levels);
      case 3: return groups<C, 3>(p, words, levels);
      case 4: return groups<C, 4>(p, words, levels);
    }
  }
  static void block(const tq::Packed &p, const uint32_t *words, float *levels) {
    switch (p.code) {
      case tq::Code::mul1: return bits<tq::Code::mul1>(p, words, levels);
      case tq::Code::one_mad: return bits<tq::Code::one_mad>(p, words, levels);
      case tq::Code::table: return bits<tq::Code::table>(p, words, levels);
    }
  }
};
