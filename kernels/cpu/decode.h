// Packed trellis matrices on the CPU: expand, and products of few rows with either stored axis.
//
// The stored matrix is [rows, cols] with row stride `stride` (weights): element (r, c) is number r*stride + c of one stream, coded in blocks of 256.
// With tile = 16 a block is a square of 16 x 16, row-major; squares follow one another along the columns, and ranges of rows begin and end on squares.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tq {

enum class Code { mul1, one_mad, table };

constexpr size_t kBlock = 256;

struct Packed {
  const uint32_t *words;
  const float *scales;  // [rows]; for products already times the code's inverse unit where the code has integer levels
  const float *table;   // [2^L] values for Code::table, else null
  size_t rows, cols, stride;
  int axis, tile, bits, window;
  Code code;
};

// Up to four lines of x or y; count is 1, 2 or 4.
struct Rows {
  float *at[4];
  int count;
};

struct Kernels {
  const char *name;
  // out [rows, cols] = (level * unit) * scale, rows [begin, end). `unit` is 1 for tables.
  void (*expand)(const Packed &p, float unit, size_t begin, size_t end, float *out);
  // Any stride. y[m, rows] for rows [begin, end): y[i, r] = scale[r] * sum_c level[r, c] * x[i, c]
  void (*reduce)(const Packed &p, size_t begin, size_t end, const float *x, size_t m, float *y);
  // y[m, cols] += over rows [begin, end): (x[i, r] * scale[r]) * level[r, c]
  void (*scatter)(const Packed &p, size_t begin, size_t end, const float *x, size_t m, float *y);
  // Strides of whole groups (16), or null: the same for rows [begin, end), with axis 0 added to y. Lines along the columns are `stride` long, those of x
  // with zeros from cols on.
  void (*product)(const Packed &p, size_t begin, size_t end, const Rows &x, const Rows &y);
};

extern const Kernels kernels_scalar, kernels_avx2, kernels_avx512, kernels_neon;

}  // namespace tq
