// What stands around the search for paths: inputs in level units, words of states, sums of a refit. On all cores, since a GPU finds paths faster than one core
// can hand them over.
#include <nanobind/ndarray.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "cpu/module.h"
#include "cpu/parallel.h"

namespace nb = nanobind;
template <class T> using Matrix = nb::ndarray<T, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T> using Vector = nb::ndarray<T, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

namespace {

constexpr size_t kItems = 1 << 15;  // about so many weights are a piece of work

size_t rows_a_piece(size_t width) { return std::max<size_t>(1, kItems / std::max<size_t>(1, width)); }

// Rows times their factors, rounded to whole numbers (half to even) within ± limit, which is one.
void levels(Matrix<const float> rows, Vector<const float> factors, Matrix<int16_t> out, float limit, int threads) {
  const size_t count = rows.shape(0), width = rows.shape(1);
  if (factors.shape(0) != count || out.shape(0) != count || out.shape(1) != width) throw std::invalid_argument("shapes of factors or levels do not fit");
  const float *from = rows.data(), *factor = factors.data();
  int16_t *to = out.data();
  nb::gil_scoped_release release;
  tq::parallel_for(count, rows_a_piece(width), threads, [&](size_t begin, size_t end) {
    for (size_t r = begin; r < end; r++)
      for (size_t i = r * width; i < (r + 1) * width; i++) {
        // Below 2^22 a sum with 1.5 * 2^23 has the whole part in its last places: the processor rounds, on any of them. What is cut off first rounds to the limit.
        const float level = std::min(std::max(from[i] * factor[r], -limit), limit);
        to[i] = (int16_t)((level + 12582912.f) - 12582912.f);
      }
  });
}

// Words of blocks, from the low bits of their states; the first block that is no closed path, or -1.
int64_t pack(Matrix<const uint16_t> states, Matrix<uint32_t> words, int bits, int window, int threads) {
  const size_t blocks = states.shape(0), block = states.shape(1);
  if (bits < 1 || bits > 8 || window < bits || window > 16 || block * bits % 32) throw std::invalid_argument("no trellis has these numbers");
  if (words.shape(0) != blocks || words.shape(1) != block * bits / 32) throw std::invalid_argument("shapes of states and words do not fit");
  const uint16_t *from = states.data();
  uint32_t *to = words.data();
  const uint32_t keep = (1u << (window - bits)) - 1u, symbol = (1u << bits) - 1u;
  std::atomic<int64_t> broken{INT64_MAX};
  nb::gil_scoped_release release;
  tq::parallel_for(blocks, rows_a_piece(block), threads, [&](size_t begin, size_t end) {
    for (size_t b = begin; b < end; b++) {
      const uint16_t *path = from + b * block;
      uint32_t *word = to + b * (block * bits / 32), differs = 0, before = path[block - 1];
      for (size_t t = 0; t < block; t++) differs |= ((uint32_t)path[t] >> bits) ^ (before & keep), before = path[t];
      if (differs)
        for (int64_t known = broken; (int64_t)b < known && !broken.compare_exchange_weak(known, (int64_t)b);) {
        }
      // The last step has the lowest bits (docs/formats/trellis.md).
      uint64_t held = 0;
      int count = 0;
      for (size_t t = block; t-- > 0;) {
        held |= (uint64_t)(path[t] & symbol) << count;
        if ((count += bits) >= 32) *word++ = (uint32_t)held, held >>= 32, count -= 32;
      }
    }
  });
  return broken == INT64_MAX ? -1 : broken.load();
}

// Of each row Σ w c, Σ c c and Σ w w, in float64, by eight partial sums whose order is always the same.
void products(Matrix<const float> weights, Matrix<const float> codes, Matrix<double> sums, int threads) {
  const size_t count = weights.shape(0), width = weights.shape(1);
  if (codes.shape(0) != count || codes.shape(1) != width || sums.shape(0) != count || sums.shape(1) != 3) throw std::invalid_argument("shapes of codes or sums do not fit");
  const float *w = weights.data(), *c = codes.data();
  double *to = sums.data();
  nb::gil_scoped_release release;
  tq::parallel_for(count, rows_a_piece(width), threads, [&](size_t begin, size_t end) {
    for (size_t r = begin; r < end; r++) {
      constexpr int kLanes = 8;
      double part[3][kLanes] = {};
      const float *wr = w + r * width, *cr = c + r * width;
      size_t i = 0;
      for (; i + kLanes <= width; i += kLanes)
        for (int lane = 0; lane < kLanes; lane++) {
          const double a = wr[i + lane], b = cr[i + lane];
          part[0][lane] += a * b, part[1][lane] += b * b, part[2][lane] += a * a;
        }
      for (int lane = 0; i < width; i++, lane++) {
        const double a = wr[i], b = cr[i];
        part[0][lane] += a * b, part[1][lane] += b * b, part[2][lane] += a * a;
      }
      for (int which = 0; which < 3; which++) {
        double total = 0;
        for (int lane = 0; lane < kLanes; lane++) total += part[which][lane];
        to[r * 3 + which] = total;
      }
    }
  });
}

}  // namespace

void bind_coding(nb::module_ &m) {
  m.def("trellis_levels", &levels, nb::arg("rows"), nb::arg("factors"), nb::arg("out"), nb::arg("limit"), nb::arg("threads"));
  m.def("trellis_pack", &pack, nb::arg("states"), nb::arg("words"), nb::arg("bits"), nb::arg("window"), nb::arg("threads"));
  m.def("row_products", &products, nb::arg("weights"), nb::arg("codes"), nb::arg("sums"), nb::arg("threads"));
}
