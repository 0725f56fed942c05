// trellis_expand and trellis_matvec: checks, threads, choice of instruction set.
#include "cpu/decode.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/constants.h"
#include "cpu/module.h"
#include "cpu/parallel.h"

namespace nb = nanobind;
template <class T, int D> using Array = nb::ndarray<T, nb::numpy, nb::ndim<D>, nb::c_contig, nb::device::cpu>;

namespace {

// Rows of a scatter are summed in this many partial results whatever the number of threads, so the sum never depends on it.
constexpr size_t kSplits = 8;
constexpr size_t kPiece = 262144;  // weights that a thread takes at once, about: twice the time that waking it takes

// The best kernels that the machine has, or those that `force` names.
const tq::Kernels &kernels(const std::string &force) {
  const tq::Kernels *choices[3];
  int n = 0;
#if defined(__x86_64__) || defined(_M_X64)
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (wide && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni")) choices[n++] = &tq::kernels_avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) choices[n++] = &tq::kernels_avx2;
#elif defined(__aarch64__) || defined(_M_ARM64)
  choices[n++] = &tq::kernels_neon;
#endif
  choices[n++] = &tq::kernels_scalar;
  for (int i = 0; i < n; i++)
    if (force.empty() || force == choices[i]->name) return *choices[i];
  throw std::invalid_argument("no such instruction set here");
}

// Rows or columns rounded up to whole tiles.
size_t whole_tiles(size_t n, size_t tile) { return tile ? (n + tile - 1) / tile * tile : n; }

struct Matrix {
  tq::Packed packed;
  std::vector<float> scales;
  float unit;
};

// The caller's arrays, checked against the shape that the spec promises.
Matrix matrix(Array<const uint32_t, 1> words, Array<const float, 1> scales, Array<const float, 1> table, size_t cols, size_t stride, int axis, int tile, int bits, int window, int block,
              const std::string &code) {
  if (tile && (tile != 16 || axis != 1)) throw std::invalid_argument("tiles are squares of 16 x 16, stored [out, in]");
  // Not just a multiple: the walk goes over every square of a row, and one that holds no column would be read and written outside.
  if (tile && stride != whole_tiles(cols, tile)) throw std::invalid_argument("in tiles the stride is the columns rounded up to 16");
  const size_t rows = scales.shape(0), coded = whole_tiles(rows, tile), blocks = (coded * stride + block - 1) / block;
  if (bits < 1 || bits > 4 || window < 2 * bits || window > 16 || block != (int)tq::kBlock || stride < cols) throw std::invalid_argument("trellis shape out of range");
  if (words.shape(0) != blocks * block * bits / 32) throw std::invalid_argument("number of words does not fit rows, stride, block and bits");
  Matrix m;
  m.unit = code == "mul1" ? TQ_MUL1_INVERSE_UNIT : code == "1mad" ? TQ_1MAD_INVERSE_UNIT : 1.0f;
  if (m.unit == 1.0f && table.shape(0) != (size_t)1 << window) throw std::invalid_argument("a table code needs a table of 2^window values");
  m.scales.assign(scales.data(), scales.data() + rows);
  m.packed = {words.data(), nullptr, table.data(), rows, cols, stride, axis, tile, bits, window, code == "mul1" ? tq::Code::mul1 : code == "1mad" ? tq::Code::one_mad : tq::Code::table};
  return m;
}

void expand(Array<const uint32_t, 1> words, Array<const float, 1> scales, Array<const float, 1> table, size_t stride, int axis, int tile, int bits, int window, int block, const std::string &code,
            Array<float, 2> out, int threads, const std::string &force) {
  Matrix m = matrix(words, scales, table, out.shape(1), stride, axis, tile, bits, window, block, code);
  if (out.shape(0) != scales.shape(0)) throw std::invalid_argument("out has the wrong number of rows");
  m.packed.scales = m.scales.data();
  float *to = out.data();
  const tq::Kernels &run = kernels(force);
  nb::gil_scoped_release release;
  const size_t grain = whole_tiles(1 + kPiece / m.packed.stride, tile);
  tq::parallel_for(m.packed.rows, grain, threads, [&](size_t begin, size_t end) { run.expand(m.packed, m.unit, begin, end, to); });
}

// Axis 0, m lines of y: sums of parts of the rows, then of the parts. add(begin, end, sums) adds rows to zeros: `lines` of them, `width` apart.
template <class Add> void sum_over_rows(const tq::Packed &p, size_t m, size_t lines, size_t width, float *y, int threads, Add add) {
  const size_t grain = (p.rows + kSplits - 1) / kSplits, splits = (p.rows + grain - 1) / grain, size = lines * width;
  std::vector<float> partial(splits * size, 0.0f);
  tq::parallel_for(p.rows, grain, threads, [&](size_t begin, size_t end) { add(begin, end, partial.data() + begin / grain * size); });
  for (size_t i = 0; i < m; i++)
    for (size_t c = 0; c < p.cols; c++) {
      float sum = 0;
      for (size_t s = 0; s < splits; s++) sum += partial[s * size + i * width + c];
      y[i * p.cols + c] = sum;
    }
}

// Any stride: through a buffer of levels.
void product_of_any_stride(const tq::Kernels &run, const tq::Packed &p, const float *x, size_t m, float *y, int threads) {
  if (p.axis == 0) return sum_over_rows(p, m, m, p.cols, y, threads, [&](size_t begin, size_t end, float *sums) { run.scatter(p, begin, end, x, m, sums); });
  const size_t grain = whole_tiles(1 + kPiece / p.stride, p.tile);
  tq::parallel_for(p.rows, grain, threads, [&](size_t begin, size_t end) { run.reduce(p, begin, end, x, m, y); });
}

// The lines of `first` and after it, m in all: one, two or four; of three, the fourth is the third again.
tq::Rows lines(float *at, size_t first, size_t m, size_t width) {
  const size_t left = m - first < 4 ? m - first : 4;
  tq::Rows found;
  found.count = left == 3 ? 4 : (int)left;
  for (size_t i = 0; i < 4; i++) found.at[i] = at + (first + (i < left ? i : left - 1)) * width;
  return found;
}

// Strides of whole groups.
void product_by_groups(const tq::Kernels &run, const tq::Packed &p, const float *x, size_t m, float *y, int threads) {
  float *in = const_cast<float *>(x);  // only read
  if (p.axis == 0) {
    for (size_t first = 0; first < m; first += 4) {
      const tq::Rows from = lines(in, first, m, p.rows);
      const size_t count = from.count, used = m - first < count ? m - first : count;
      const auto add = [&](size_t begin, size_t end, float *sums) { run.product(p, begin, end, from, lines(sums, 0, count, p.stride)); };
      sum_over_rows(p, used, count, p.stride, y + first * p.cols, threads, add);
    }
    return;
  }
  std::vector<float> padded(p.stride == p.cols ? 0 : m * p.stride, 0.0f);
  for (size_t i = 0; i * p.stride < padded.size(); i++) std::memcpy(padded.data() + i * p.stride, x + i * p.cols, p.cols * sizeof(float));
  if (!padded.empty()) in = padded.data();
  const size_t grain = whole_tiles(1 + kPiece / p.stride, p.tile);
  for (size_t first = 0; first < m; first += 4) {
    const tq::Rows from = lines(in, first, m, p.stride), to = lines(y, first, m, p.rows);
    tq::parallel_for(p.rows, grain, threads, [&](size_t begin, size_t end) { run.product(p, begin, end, from, to); });
  }
}

void matvec(Array<const uint32_t, 1> words, Array<const float, 1> scales, Array<const float, 1> table, size_t stride, int axis, int tile, int bits, int window, int block, const std::string &code,
            Array<const float, 2> x, Array<float, 2> y, int threads, const std::string &force) {
  const size_t cols = axis == 1 ? x.shape(1) : y.shape(1), m_rows = x.shape(0);
  Matrix m = matrix(words, scales, table, cols, stride, axis, tile, bits, window, block, code);
  if (y.shape(0) != m_rows || (axis == 1 ? y.shape(1) : x.shape(1)) != m.packed.rows) throw std::invalid_argument("shapes of x and y do not fit the matrix");
  for (float &scale : m.scales) scale *= m.unit;
  m.packed.scales = m.scales.data();
  const float *in = x.data();
  float *out = y.data();
  const tq::Kernels &run = kernels(force);
  nb::gil_scoped_release release;
  if (run.product && stride % 16 == 0) return product_by_groups(run, m.packed, in, m_rows, out, threads);
  product_of_any_stride(run, m.packed, in, m_rows, out, threads);
}

}  // namespace

void bind_decode(nb::module_ &m) {
  m.def("trellis_expand", &expand, nb::arg("words"), nb::arg("scales"), nb::arg("table"), nb::arg("stride"), nb::arg("axis"), nb::arg("tile"), nb::arg("bits"), nb::arg("window"), nb::arg("block"),
        nb::arg("code"), nb::arg("out"), nb::arg("threads"), nb::arg("force"));
  m.def("trellis_matvec", &matvec, nb::arg("words"), nb::arg("scales"), nb::arg("table"), nb::arg("stride"), nb::arg("axis"), nb::arg("tile"), nb::arg("bits"), nb::arg("window"), nb::arg("block"),
        nb::arg("code"), nb::arg("x"), nb::arg("y"), nb::arg("threads"), nb::arg("force"));
}
