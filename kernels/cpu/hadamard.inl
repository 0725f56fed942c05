// The panel transform of hadamard.cpp, compiled once per instruction set: the includer defines the namespace, turns the
// instruction set on and sets TQ_VECTOR_BYTES. Nothing from the standard library is instantiated in here, so that no code
// of a wider set can leak into the rest of the program.

template <typename T> struct Vector; // the widest register type of T; may_alias, because panels are plain arrays of T
template <> struct Vector<float> {
  typedef float type __attribute__((vector_size(TQ_VECTOR_BYTES), may_alias));
};
template <> struct Vector<double> {
  typedef double type __attribute__((vector_size(TQ_VECTOR_BYTES), may_alias));
};

// Butterflies at distances h and 2h in one pass over `rows` panel rows: the same sums, half the memory traffic.
template <typename T> void two_stages(T *panel, std::size_t rows, std::size_t h) {
  using V = typename Vector<T>::type;
  const std::size_t reach = h * sizeof(Line<T>) / sizeof(V);
  for (std::size_t base = 0; base < rows; base += 4 * h) {
    V *p0 = reinterpret_cast<V *>(panel + base * LANES<T>), *p1 = p0 + reach, *p2 = p1 + reach, *p3 = p2 + reach;
    for (std::size_t i = 0; i < reach; ++i) {
      const V sum01 = p0[i] + p1[i], difference01 = p0[i] - p1[i];
      const V sum23 = p2[i] + p3[i], difference23 = p2[i] - p3[i];
      p0[i] = sum01 + sum23;
      p1[i] = difference01 + difference23;
      p2[i] = sum01 - sum23;
      p3[i] = difference01 - difference23;
    }
  }
}

template <typename T> void one_stage(T *panel, std::size_t rows, std::size_t h) {
  using V = typename Vector<T>::type;
  const std::size_t reach = h * sizeof(Line<T>) / sizeof(V);
  for (std::size_t base = 0; base < rows; base += 2 * h) {
    V *p0 = reinterpret_cast<V *>(panel + base * LANES<T>), *p1 = p0 + reach;
    for (std::size_t i = 0; i < reach; ++i) {
      const V u = p0[i], v = p1[i];
      p0[i] = u + v;
      p1[i] = u - v;
    }
  }
}

// Distances first, 2 * first, ... below end.
template <typename T> void stages(T *panel, std::size_t rows, std::size_t first, std::size_t end) {
  std::size_t h = first;
  for (; 4 * h <= end; h *= 4) two_stages(panel, rows, h);
  if (2 * h <= end) one_stage(panel, rows, h);
}

// Step 2 on one run of 2^k rows. Blocking changes when a butterfly happens, never what it adds.
template <typename T> void butterflies(T *panel, std::size_t run) {
  const std::size_t block = run < L1_ROWS ? run : L1_ROWS;
  for (std::size_t row = 0; row < run; row += block) stages(panel + row * LANES<T>, block, 1, block);
  stages(panel, run, block, run);
}

// Steps 3 and 4 for output rows c .. c+3: `in` holds the m rows that share one b.
template <typename T>
void four_sums(const Line<T> *in, const T *factor, std::size_t m, std::size_t c, T norm, Line<T> *out) {
  using V = typename Vector<T>::type;
  for (std::size_t v = 0; v < sizeof(Line<T>) / sizeof(V); ++v) {
    const V first = reinterpret_cast<const V *>(in)[v];
    V sum0 = factor[c] * first, sum1 = factor[c + 1] * first, sum2 = factor[c + 2] * first, sum3 = factor[c + 3] * first;
    for (std::size_t a = 1; a < m; ++a) {
      const V x = reinterpret_cast<const V *>(in + a)[v];
      const T *sign = factor + a * m + c;
      sum0 += sign[0] * x;
      sum1 += sign[1] * x;
      sum2 += sign[2] * x;
      sum3 += sign[3] * x;
    }
    reinterpret_cast<V *>(out + c)[v] = sum0 * norm;
    reinterpret_cast<V *>(out + c + 1)[v] = sum1 * norm;
    reinterpret_cast<V *>(out + c + 2)[v] = sum2 * norm;
    reinterpret_cast<V *>(out + c + 3)[v] = sum3 * norm;
  }
}

// Steps 2 to 4 on a panel of n rows. `work` holds 2 * m rows.
template <typename T> void transform_panel(Line<T> *panel, const Shape &s, const T *factor, T norm, Line<T> *work) {
  using V = typename Vector<T>::type;
  for (std::size_t a = 0; a < s.m; ++a) butterflies(panel[a * s.run].values, s.run);
  if (s.m == 1) {
    V *values = reinterpret_cast<V *>(panel);
    for (std::size_t i = 0; i < s.n * (sizeof(Line<T>) / sizeof(V)); ++i) values[i] *= norm;
    return;
  }
  Line<T> *in = work, *out = work + s.m;
  for (std::size_t b = 0; b < s.run; ++b) {
    // Rows a * 2^k + b lie a power of two apart, on few cache sets: bring them together once.
    for (std::size_t a = 0; a < s.m; ++a) in[a] = panel[a * s.run + b];
    for (std::size_t c = 0; c < s.m; c += 4) four_sums(in, factor, s.m, c, norm, out); // m > 1 is a multiple of 4
    for (std::size_t a = 0; a < s.m; ++a) panel[a * s.run + b] = out[a];
  }
}
