// y = x Wᵀ, W in squares of 16 x 16, 1 to 4 rows of x.
//
// x [M, COLS] · words · scales [ROWS] → out [M, ROWS]
// T: type of x and y · K, L, CODE: of the trellis · M · LIMBS: bytes of an input · ROWS, COLS · SQUARES in a row of them · SLICE: units of x at once · BLOCKS: thread blocks.
#include "cuda/tile.cuh"

tq_tile<K, L, CODE, 1, M, LIMBS, ROWS, COLS, SQUARES, SLICE, BLOCKS>(words, scales, words, scales, x, out);
