// Packed trellis matrices on the CPU: expand, and matrix-vector products along either stored axis.
//
// The stored matrix is [rows, cols] with row stride `stride` (weights): element (r, c) is number r*stride + c of one stream, coded in blocks of
// T. All three operations walk blocks in order, decode each into T float levels, and hand runs of one row to a sink. With tile = 16 a block is a
// square of 16 x 16, row-major; squares follow one another along the columns, and ranges of rows begin and end on squares.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tq {

enum class Code { mul1, one_mad, table };

struct Packed {
  const uint32_t *words;
  const float *scales;  // [rows], already times the code's inverse unit where the code has integer levels
  const float *table;   // [2^L] values for Code::table, else null
  size_t rows, cols, stride;
  int tile, bits, window, block;
  Code code;
};

struct Kernels {
  // out [rows, cols] = (level * unit) * scale, rows [begin, end). `unit` is 1 for tables.
  void (*expand)(const Packed &p, float unit, size_t begin, size_t end, float *out);
  // y[m, rows] for rows [begin, end): y[i, r] = scale[r] * sum_c level[r, c] * x[i, c]
  void (*reduce)(const Packed &p, size_t begin, size_t end, const float *x, size_t m, float *y);
  // y[m, cols] += over rows [begin, end): (x[i, r] * scale[r]) * level[r, c]
  void (*scatter)(const Packed &p, size_t begin, size_t end, const float *x, size_t m, float *y);
};

extern const Kernels kernels_scalar;
extern const Kernels kernels_avx2;

}  // namespace tq
