// y = x Wᵀ, W in squares of 16 x 16, 1 to 4 rows of x.
//
// x [M, COLS] · words · scales [ROWS] → out: WHOLE, y [M, ROWS] of T; else uint32, zeros before: y, then sums that several blocks add up
// T: type of x and y · K, L, CODE: of the trellis · M · LIMBS: bytes of an input · WHOLE: no row of tiles is cut · ROWS, COLS · SQUARES in a row of them · SLICE: units of x at once.
#include "cuda/tile.cuh"

tq_tile<K, L, CODE, 1, M, LIMBS, WHOLE>(words, scales, words, scales, x, TqTileDims{ROWS, COLS, (ROWS + 15) / 16, SQUARES, SLICE}, out);
