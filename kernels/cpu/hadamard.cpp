// Fast Hadamard transform along one axis of a contiguous array seen as [outer, n, inner], n = m * 2^k:
//
//     y[o, j, i] = 1/sqrt(n) * sum_r (scale[r] * x[o, r, i]) * H[r, j],        H = F (x) S,
//
// F an m x m matrix of +-1 (Paley), S the 2^k Sylvester matrix; index r = a * 2^k + b has F's row a and S's row b.
//
// The order of operations is part of the contract, so that folded weights have the same bytes on every machine and for
// every thread count (tqtool/mathx/hadamard.py holds the same order in numpy, compared bit for bit in the tests):
//     1. multiply by scale[r], if given;
//     2. butterflies (u, v) -> (u + v, u - v) at distance 1, 2, 4, ... 2^(k-1) inside each run of 2^k;
//     3. for each b and output row c: sum over a = 0, 1, ... m-1 in that order of F[a, c] * t[a, b]   (m > 1 only);
//     4. one multiply by 1/sqrt(n), rounded to the array's type.
// Multiplying by +-1 is exact and -ffp-contract=off keeps every product and sum apart, so vector width does not matter.
//
// One cache line of columns (inner > 1) or of rows (inner == 1) is gathered into a [n][LANES] panel, transformed there
// and scattered back: one kernel serves both axes, the inner loop is always a contiguous vector, and in place is safe
// because a panel is read before it is written. Peak extra memory: one panel and 2m lines per thread.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "cpu/module.h"
#include "cpu/parallel.h"

namespace nb = nanobind;

namespace {

constexpr std::size_t LINE_BYTES = 64;
template <typename T> constexpr std::size_t LANES = LINE_BYTES / sizeof(T);
constexpr std::size_t L1_ROWS = 256; // 16 KiB of panel: small distances are finished while it is in L1
constexpr std::size_t PIECES = 32;   // of work: enough that threads end together, few enough to share a buffer

template <typename T> struct alignas(LINE_BYTES) Line {
  T values[LANES<T>];
};

struct Shape {
  std::size_t outer, n, inner, m, run; // n = m * run, run = 2^k
};

#if defined(__x86_64__) && defined(__clang__)
#define TQ_TARGET_PUSH_AVX2 _Pragma("clang attribute push(__attribute__((target(\"avx2\"))), apply_to = function)")
#define TQ_TARGET_PUSH_AVX512 _Pragma("clang attribute push(__attribute__((target(\"avx512f\"))), apply_to = function)")
#define TQ_TARGET_POP _Pragma("clang attribute pop")
#elif defined(__x86_64__)
#define TQ_TARGET_PUSH_AVX2 _Pragma("GCC push_options") _Pragma("GCC target(\"avx2\")")
#define TQ_TARGET_PUSH_AVX512 _Pragma("GCC push_options") _Pragma("GCC target(\"avx512f\")")
#define TQ_TARGET_POP _Pragma("GCC pop_options")
#endif

namespace baseline { // SSE2 or NEON: part of the architecture
#define TQ_VECTOR_BYTES 16
#include "cpu/hadamard.inl"
#undef TQ_VECTOR_BYTES
} // namespace baseline

#ifdef __x86_64__
TQ_TARGET_PUSH_AVX2
namespace avx2 {
#define TQ_VECTOR_BYTES 32
#include "cpu/hadamard.inl"
#undef TQ_VECTOR_BYTES
} // namespace avx2
TQ_TARGET_POP
TQ_TARGET_PUSH_AVX512
namespace avx512 {
#define TQ_VECTOR_BYTES 64
#include "cpu/hadamard.inl"
#undef TQ_VECTOR_BYTES
} // namespace avx512
TQ_TARGET_POP
#endif

template <typename T> using PanelTransform = void (*)(Line<T> *, const Shape &, const T *, T, Line<T> *);

void require(bool holds, const char *message) {
  if (!holds) throw std::invalid_argument(message);
}

// The panel transform of the named instruction set; "" is the best this machine has.
template <typename T> PanelTransform<T> pick_transform(const std::string &force) {
#ifdef __x86_64__
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2"), has_avx512 = __builtin_cpu_supports("avx512f");
  require(force != "avx2" || has_avx2, "this machine has no avx2");
  require(force != "avx512" || has_avx512, "this machine has no avx512");
  if (force == "avx512" || (force.empty() && has_avx512)) return avx512::transform_panel<T>;
  if (force == "avx2" || (force.empty() && has_avx2)) return avx2::transform_panel<T>;
#endif
  require(force.empty() || force == "scalar", "unknown instruction set");
  return baseline::transform_panel<T>;
}

// inner > 1: lanes are neighbouring columns.
template <typename T>
void gather_columns(const T *x, const Shape &s, std::size_t width, const T *scale, Line<T> *panel) {
  for (std::size_t r = 0; r < s.n; ++r)
    for (std::size_t lane = 0; lane < width; ++lane)
      panel[r].values[lane] = scale ? x[r * s.inner + lane] * scale[r] : x[r * s.inner + lane];
}

template <typename T> void scatter_columns(const Line<T> *panel, const Shape &s, std::size_t width, T *y) {
  for (std::size_t r = 0; r < s.n; ++r) std::copy_n(panel[r].values, width, y + r * s.inner);
}

// inner == 1: lanes are neighbouring rows, so this is a transpose, one square of lines at a time: rows a power of two
// apart share cache sets, and reading one element of each in turn would evict every line before its next use.
template <typename T>
void gather_rows(const T *x, const Shape &s, std::size_t width, const T *scale, Line<T> *panel) {
  for (std::size_t first = 0; first < s.n; first += LANES<T>) {
    const std::size_t last = std::min(s.n, first + LANES<T>);
    for (std::size_t lane = 0; lane < width; ++lane)
      for (std::size_t r = first; r < last; ++r)
        panel[r].values[lane] = scale ? x[lane * s.n + r] * scale[r] : x[lane * s.n + r];
  }
}

template <typename T> void scatter_rows(const Line<T> *panel, const Shape &s, std::size_t width, T *y) {
  for (std::size_t first = 0; first < s.n; first += LANES<T>) {
    const std::size_t last = std::min(s.n, first + LANES<T>);
    for (std::size_t lane = 0; lane < width; ++lane)
      for (std::size_t r = first; r < last; ++r) y[lane * s.n + r] = panel[r].values[lane];
  }
}

template <typename T> struct Job {
  const T *x;
  T *y;
  const T *scale;
  const T *factor;
  T norm;
  Shape shape;
  PanelTransform<T> transform;

  std::size_t column_panels() const { return (shape.inner + LANES<T> - 1) / LANES<T>; }
  std::size_t panels() const {
    return shape.inner == 1 ? (shape.outer + LANES<T> - 1) / LANES<T> : shape.outer * column_panels();
  }
};

template <typename T> void run_panel(const Job<T> &job, std::size_t index, Line<T> *panel, Line<T> *work) {
  const Shape &s = job.shape;
  if (s.inner == 1) {
    const std::size_t row = index * LANES<T>, width = std::min(LANES<T>, s.outer - row);
    gather_rows(job.x + row * s.n, s, width, job.scale, panel);
    job.transform(panel, s, job.factor, job.norm, work);
    scatter_rows(panel, s, width, job.y + row * s.n);
    return;
  }
  const std::size_t column = index % job.column_panels() * LANES<T>, width = std::min(LANES<T>, s.inner - column);
  const std::size_t start = index / job.column_panels() * s.n * s.inner + column;
  gather_columns(job.x + start, s, width, job.scale, panel);
  job.transform(panel, s, job.factor, job.norm, work);
  scatter_columns(panel, s, width, job.y + start);
}

template <typename T> void run(const Job<T> &job, int threads) {
  const std::size_t panels = job.panels(), grain = std::max<std::size_t>(1, panels / PIECES);
  tq::parallel_for(panels, grain, threads, [&](std::size_t first, std::size_t last) {
    // Zeroed, so that idle lanes of a ragged panel hold defined values.
    std::vector<Line<T>> buffer(job.shape.n + 2 * job.shape.m);
    for (std::size_t index = first; index < last; ++index)
      run_panel(job, index, buffer.data(), buffer.data() + job.shape.n);
  });
}

template <typename T> using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu>;

template <typename T>
void transform(const Array<const T> &x, const Array<T> &y, Shape shape, const Array<const std::int8_t> &factor,
               const std::optional<Array<const T>> &scale, int threads, const std::string &force) {
  shape.m = factor.ndim() == 2 ? factor.shape(0) : 0;
  require(shape.m != 0 && factor.shape(1) == shape.m && (shape.m == 1 || shape.m % 4 == 0),
          "factor: expected [m, m], m = 1 or a multiple of 4");
  shape.run = shape.n / shape.m;
  require(shape.run != 0 && shape.n % shape.m == 0 && (shape.run & (shape.run - 1)) == 0, "n: expected m * 2^k");
  require(x.size() == shape.outer * shape.n * shape.inner && y.size() == x.size(),
          "x, y: expected outer * n * inner values");
  require(!scale || scale->size() == shape.n, "scale: expected n values");
  if (x.size() == 0) return;
  const std::vector<T> signs(factor.data(), factor.data() + shape.m * shape.m);
  const T norm = static_cast<T>(1.0 / std::sqrt(static_cast<double>(shape.n)));
  const Job<T> job{x.data(), y.data(), scale ? scale->data() : nullptr, signs.data(), norm, shape,
                   pick_transform<T>(force)};
  nb::gil_scoped_release release;
  run(job, threads);
}

template <typename T> void bind_transform(nb::module_ &m, const char *name) {
  m.def(
      name,
      [](Array<const T> x, Array<T> y, std::size_t outer, std::size_t n, std::size_t inner,
         Array<const std::int8_t> factor, std::optional<Array<const T>> scale, int threads, const std::string &force) {
        transform<T>(x, y, Shape{outer, n, inner, 0, 0}, factor, scale, threads, force);
      },
      nb::arg("x").noconvert(), nb::arg("y").noconvert(), nb::arg("outer"), nb::arg("n"), nb::arg("inner"),
      nb::arg("factor").noconvert(), nb::arg("scale").noconvert().none(), nb::arg("threads"), nb::arg("force"));
}

} // namespace

void bind_hadamard(nb::module_ &m) {
  bind_transform<float>(m, "hadamard_f32");
  bind_transform<double>(m, "hadamard_f64");
}
