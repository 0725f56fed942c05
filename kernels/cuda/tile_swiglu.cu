// y = silu(x Gᵀ) * (x Uᵀ), both in squares of 16 x 16 and of the same bits, 1 to 4 rows of x.
//
// x [M, COLS] · words, scales of G · up_words, up_scales of U → out [M, ROWS]; parameters as in tile.cu
#include "cuda/tile.cuh"

tq_tile<K, L, CODE, 2, M, LIMBS, ROWS, COLS, SQUARES, SLICE, BLOCKS>(words, scales, up_words, up_scales, x, out);
