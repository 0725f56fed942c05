// Body of decode.h's kernels for any stride, written once over a decoder D:  D::block(p, words, levels) writes the levels of one block.
// Included inside an anonymous namespace of each instruction set's source.

constexpr int kTile = 16;

// Calls sink(levels, row, col) for every square that holds rows [begin, end); begin is a multiple of kTile.
template <class D, class Sink> inline void walk_tiles(const tq::Packed &p, size_t begin, size_t end, Sink sink) {
  const size_t n_words = tq::kBlock / 32 * p.bits, across = p.stride / kTile;
  alignas(64) float levels[tq::kBlock];
  for (size_t row = begin; row < end; row += kTile)
    for (size_t i = 0; i < across; i++) {
      D::block(p, p.words + (row / kTile * across + i) * n_words, levels);
      sink(levels, row, i * kTile);
    }
}

// Calls sink(row, col, levels, run) for every run of one row inside rows [begin, end), in stream order.
template <class D, class Sink> inline void walk(const tq::Packed &p, size_t begin, size_t end, Sink sink) {
  if (p.tile) {
    walk_tiles<D>(p, begin, end, [&](const float *levels, size_t row, size_t col) {
      const size_t rows = end - row < kTile ? end - row : kTile, run = p.cols - col < kTile ? p.cols - col : kTile;
      for (size_t r = 0; r < rows; r++) sink(row + r, col, levels + r * kTile, run);
    });
    return;
  }
  constexpr size_t T = tq::kBlock;
  const size_t n_words = T / 32 * p.bits, first = begin * p.stride, last = end * p.stride;
  alignas(64) float levels[tq::kBlock];
  for (size_t b = first / T; b * T < last; b++) {
    D::block(p, p.words + b * n_words, levels);
    const size_t block_end = (b + 1) * T < last ? (b + 1) * T : last;
    for (size_t i = b * T > first ? b * T : first; i < block_end;) {
      const size_t row = i / p.stride, col = i % p.stride, left = p.stride - col, run = left < block_end - i ? left : block_end - i;
      if (col < p.cols) sink(row, col, levels + (i - b * T), run < p.cols - col ? run : p.cols - col);
      i += run;
    }
  }
}

// Sixteen running sums in a fixed order: vectorizable without reassociation, the same on every machine that has the same vector width.
inline float dot(const float *a, const float *b, size_t n) {
  float sum[16] = {0};
  size_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int l = 0; l < 16; l++) sum[l] += a[i + l] * b[i + l];
  for (; i < n; i++) sum[i & 15] += a[i] * b[i];
  for (int half = 8; half; half >>= 1)
    for (int l = 0; l < half; l++) sum[l] += sum[l + half];
  return sum[0];
}

template <class D> void expand(const tq::Packed &p, float unit, size_t begin, size_t end, float *out) {
  walk<D>(p, begin, end, [&](size_t row, size_t col, const float *levels, size_t n) {
    float *to = out + row * p.cols + col;
    const float scale = p.scales[row];
    for (size_t i = 0; i < n; i++) to[i] = (levels[i] * unit) * scale;
  });
}

template <class D> void reduce(const tq::Packed &p, size_t begin, size_t end, const float *x, size_t m, float *y) {
  for (size_t i = 0; i < m; i++)
    for (size_t r = begin; r < end; r++) y[i * p.rows + r] = 0;
  walk<D>(p, begin, end, [&](size_t row, size_t col, const float *levels, size_t n) {
    for (size_t i = 0; i < m; i++) y[i * p.rows + row] += dot(levels, x + i * p.cols + col, n);
  });
  for (size_t i = 0; i < m; i++)
    for (size_t r = begin; r < end; r++) y[i * p.rows + r] *= p.scales[r];
}

template <class D> void scatter(const tq::Packed &p, size_t begin, size_t end, const float *x, size_t m, float *y) {
  walk<D>(p, begin, end, [&](size_t row, size_t col, const float *levels, size_t n) {
    for (size_t i = 0; i < m; i++) {
      const float factor = x[i * p.rows + row] * p.scales[row];
      float *to = y + i * p.cols + col;
      for (size_t c = 0; c < n; c++) to[c] += factor * levels[c];
    }
  });
}
