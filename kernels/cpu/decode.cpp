// trellis_expand and trellis_matvec: checks, threads, choice of instruction set.
#include "cpu/decode.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

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

const tq::Kernels &kernels(const std::string &force) {
#if defined(__x86_64__) || defined(_M_X64)
  if (force != "scalar" && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return tq::kernels_avx2;
#endif
  return tq::kernels_scalar;
}

// Rows or columns rounded up to whole tiles.
size_t whole_tiles(size_t n, size_t tile) { return tile ? (n + tile - 1) / tile * tile : n; }

struct Matrix {
  tq::Packed packed;
  std::vector<float> scales;  // with the unit folded in
  float unit;
};

// The caller's arrays, checked against the shape that the spec promises.
Matrix matrix(Array<const uint32_t, 1> words, Array<const float, 1> scales, Array<const float, 1> table, size_t cols, size_t stride, int tile, int bits, int window, int block,
              const std::string &code) {
  if (tile && (tile != 16 || block != tile * tile)) throw std::invalid_argument("tiles are squares of 16 x 16");
  // Not just a multiple: the walk goes over every square of a row, and one that holds no column would be read and written outside.
  if (tile && stride != whole_tiles(cols, tile)) throw std::invalid_argument("in tiles the stride is the columns rounded up to 16");
  const size_t rows = scales.shape(0), coded = whole_tiles(rows, tile), blocks = (coded * stride + block - 1) / block;
  if (bits < 1 || bits > 4 || window < 2 * bits || window > 16 || block < 32 || block > 1024 || block % 32 || stride < cols)
    throw std::invalid_argument("trellis shape out of range");
  if (words.shape(0) != blocks * block * bits / 32) throw std::invalid_argument("number of words does not fit rows, stride, block and bits");
  Matrix m;
  m.unit = code == "mul1" ? TQ_MUL1_INVERSE_UNIT : code == "1mad" ? TQ_1MAD_INVERSE_UNIT : 1.0f;
  if (m.unit == 1.0f && table.shape(0) != (size_t)1 << window) throw std::invalid_argument("a table code needs a table of 2^window values");
  m.scales.assign(scales.data(), scales.data() + rows);
  m.packed = {words.data(), nullptr, table.data(), rows, cols, stride, tile, bits, window, block, code == "mul1" ? tq::Code::mul1 : code == "1mad" ? tq::Code::one_mad : tq::Code::table};
  return m;
}

void expand(Array<const uint32_t, 1> words, Array<const float, 1> scales, Array<const float, 1> table, size_t stride, int tile, int bits, int window, int block, const std::string &code,
            Array<float, 2> out, int threads, const std::string &force) {
  Matrix m = matrix(words, scales, table, out.shape(1), stride, tile, bits, window, block, code);
  if (out.shape(0) != scales.shape(0)) throw std::invalid_argument("out has the wrong number of rows");
  m.packed.scales = m.scales.data();
  float *to = out.data();
  const tq::Kernels &run = kernels(force);
  nb::gil_scoped_release release;
  const size_t grain = whole_tiles(1 + 65536 / m.packed.stride, tile);
  tq::parallel_for(m.packed.rows, grain, threads, [&](size_t begin, size_t end) { run.expand(m.packed, m.unit, begin, end, to); });
}

void matvec(Array<const uint32_t, 1> words, Array<const float, 1> scales, Array<const float, 1> table, size_t stride, int tile, int bits, int window, int block, const std::string &code,
            int axis, Array<const float, 2> x, Array<float, 2> y, int threads, const std::string &force) {
  const size_t cols = axis == 1 ? x.shape(1) : y.shape(1), m_rows = x.shape(0);
  Matrix m = matrix(words, scales, table, cols, stride, tile, bits, window, block, code);
  const size_t rows = m.packed.rows;
  if (tile && axis != 1) throw std::invalid_argument("tiles are stored [out, in]");
  if (y.shape(0) != m_rows || (axis == 1 ? y.shape(1) : x.shape(1)) != rows) throw std::invalid_argument("shapes of x and y do not fit the matrix");
  for (float &scale : m.scales) scale *= m.unit;
  m.packed.scales = m.scales.data();
  const float *in = x.data();
  float *out = y.data();
  const tq::Kernels &run = kernels(force);
  nb::gil_scoped_release release;
  if (axis == 1) {
    const size_t grain = whole_tiles(1 + 131072 / stride, tile);
    tq::parallel_for(rows, grain, threads, [&](size_t begin, size_t end) { run.reduce(m.packed, begin, end, in, m_rows, out); });
    return;
  }
  const size_t grain = (rows + kSplits - 1) / kSplits, splits = (rows + grain - 1) / grain, size = m_rows * cols;
  std::vector<float> partial(splits * size, 0.0f);
  tq::parallel_for(rows, grain, threads, [&](size_t begin, size_t end) { run.scatter(m.packed, begin, end, in, m_rows, partial.data() + begin / grain * size); });
  for (size_t i = 0; i < size; i++) {
    float sum = 0;
    for (size_t s = 0; s < splits; s++) sum += partial[s * size + i];
    out[i] = sum;
  }
}

}  // namespace

void bind_decode(nb::module_ &m) {
  m.def("trellis_expand", &expand, nb::arg("words"), nb::arg("scales"), nb::arg("table"), nb::arg("stride"), nb::arg("tile"), nb::arg("bits"), nb::arg("window"), nb::arg("block"), nb::arg("code"),
        nb::arg("out"), nb::arg("threads"), nb::arg("force"));
  m.def("trellis_matvec", &matvec, nb::arg("words"), nb::arg("scales"), nb::arg("table"), nb::arg("stride"), nb::arg("tile"), nb::arg("bits"), nb::arg("window"), nb::arg("block"), nb::arg("code"),
        nb::arg("axis"), nb::arg("x"), nb::arg("y"), nb::arg("threads"), nb::arg("force"));
}
