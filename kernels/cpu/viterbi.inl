// The search itself, written once over a vector type V (see viterbi_*.cpp). Everything here is exact integer arithmetic in V::cost.
// Included inside an anonymous namespace of each instruction set's source, so that no code compiled for one is merged with another.

template <class V, int K> inline void step(const tq::Trellis &t, float x, const typename V::cost *m, typename V::cost *out) {
  constexpr int D = 1 << K;
  const int J = 1 << (t.window - K), shift = t.window - 2 * K;
  const typename V::reg vx = V::set1(x);
  for (int j = 0; j < J; j += V::width) {
    const float *level = t.levels + j;
    const typename V::cost *pred = m + (j >> K);
    typename V::reg diff = V::sub(vx, V::level(level)), best = V::fma(diff, diff, V::template spread<K>(pred));
#pragma GCC unroll 16
    for (int d = 1; d < D; d++) {
      diff = V::sub(vx, V::level(level + (size_t)d * J));
      best = V::min(best, V::fma(diff, diff, V::template spread<K>(pred + ((size_t)d << shift))));
    }
    V::store(out + j, best);
  }
}

template <class V> inline void subtract_lowest(typename V::cost *m, int J) {
  typename V::reg low = V::load(m);
  for (int j = V::width; j < J; j += V::width) low = V::min(low, V::load(m + j));
  const typename V::reg base = V::set1(V::lowest(low));
  for (int j = 0; j < J; j += V::width) V::store(m + j, V::sub(V::load(m + j), base));
}

// Rows m_0 .. m_n of a pass; row i lies at rows + i*J. The first `skip` rows are not needed later and share two buffers.
template <class Cost> struct Rows {
  Cost *kept, *pair;
  int J, skip;
  Cost *operator[](int i) const { return i < skip ? pair + (size_t)(i & 1) * J : kept + (size_t)(i - skip) * J; }
};

// Steps begin .. end-1 of a pass whose step 0 takes input `first`.
template <class V, int K> inline void forward(const tq::Trellis &t, const float *x, int first, int begin, int end, int renormalise, const Rows<typename V::cost> &rows) {
  for (int i = begin; i < end; i++) {
    typename V::cost *m = rows[i];
    if (i > 0 && i % renormalise == 0) subtract_lowest<V>(m, rows.J);
    int at = first + i;
    if (at < 0) at += t.block;
    if (at >= t.block) at -= t.block;
    step<V, K>(t, x[at], m, rows[i + 1]);
  }
}

// Walk back from suffix j after step n-1 to before step `stop`, choosing again the lowest best predecessor; returns the suffix there.
template <class V, int K>
inline int backward(const tq::Trellis &t, const float *x, int first, int n, int stop, const Rows<typename V::cost> &rows, int j, uint16_t *states) {
  constexpr int D = 1 << K;
  const int J = 1 << (t.window - K);
  for (int i = n - 1; i >= stop; i--) {
    const typename V::cost *m = rows[i];
    int at = first + i;
    if (at < 0) at += t.block;
    if (at >= t.block) at -= t.block;
    typename V::cost best = 0;
    int state = -1;
    for (int d = 0; d < D; d++) {
      const int s = d * J | j;
      const typename V::cost diff = x[at] - t.levels[s], cost = m[s >> K] + diff * diff;
      if (state < 0 || cost < best) best = cost, state = s;
    }
    if (states) states[at] = (uint16_t)state;
    j = state >> K;
  }
  return j;
}

template <class V, int K> void encode_block(const tq::Trellis &t, const float *x, int renormalise, uint16_t *states, float *scratch) {
  using Cost = typename V::cost;
  const int J = 1 << (t.window - K), T = t.block, w = t.warmup;
  // Pass 1: free ends, the seam in the middle. It only has to say which suffix stands at the seam.
  Rows<Cost> rows{(Cost *)scratch + 2 * (size_t)J, (Cost *)scratch, J, w};
  for (int j = 0; j < J; j++) rows[0][j] = 0;
  forward<V, K>(t, x, -w, 0, 2 * w, renormalise, rows);
  const Cost *last = rows[2 * w];
  int end = 0;
  for (int j = 1; j < J; j++)
    if (last[j] < last[end]) end = j;
  const int seam = backward<V, K>(t, x, -w, 2 * w, w, rows, end, nullptr);
  // Pass 2, pinned to that suffix at both ends, wants for every suffix the best path that began there. Pass 1 has best paths that began anywhere, which cost no more:
  // so it goes on, half a pass, as if the seam did not matter. If the path that ends at the seam's suffix has also come through it at the seam, it is the best of
  // those that did, and the one that pass 2 would find, ties included: along it both have the same costs but for a constant, nowhere has pass 2 lower ones. With a
  // short pass 1 few paths are closed.
  if (2 * w == T) {
    forward<V, K>(t, x, -w, 2 * w, T + w, renormalise, rows);
    if (backward<V, K>(t, x, -w, T + w, w, rows, seam, states) == seam) return;
  }
  rows.skip = 0;
  for (int j = 0; j < J; j++) rows[0][j] = __builtin_inff();
  rows[0][seam] = 0;
  forward<V, K>(t, x, 0, 0, T, renormalise, rows);
  backward<V, K>(t, x, 0, T, 0, rows, seam, states);
}

template <class V> tq::EncodeBlock pick(int bits, int window) {
  if (window < 2 * bits || (1 << (window - bits)) < V::width) return nullptr;
  switch (bits) {
    case 1: return encode_block<V, 1>;
    case 2: return encode_block<V, 2>;
    case 3: return encode_block<V, 3>;
    case 4: return encode_block<V, 4>;
  }
  return nullptr;
}
