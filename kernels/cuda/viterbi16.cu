// Tail-biting search at L = 16, states equal to kernels/cpu/viterbi.inl's. As viterbi.cu, but for what 65536 states leave no room for:
//
// * levels lie two in a register, times 4 (K = 2: 2). Costs are 16 times (4 times) the squares, so that the square of a level is one multiply-add too.
// * costs have one row, in which they move: see TqInPlace. At K = 2 it holds two blocks.
//
// dims as in viterbi.cu → history uint32 [grid, 512, 2^(L-K) / 2], half of it at K = 2. K: 2 to 4. 256 threads, one thread block a processor.
#include "cuda/viterbi_in_place.cuh"
#include "cuda/viterbi_16.cuh"

tq_viterbi<TqInPlace<16, K>>(x, levels, dims, states, history);
