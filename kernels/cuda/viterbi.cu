// Tail-biting search for the best path of each block at L = 12: QTIP's Algorithm 4, states equal to kernels/cpu/viterbi.inl's.
//
// Four blocks at a time in a thread block of 2^L/32, each thread with 32 states whose levels stay in its registers for the whole launch. The cost of a state is
//   2^K (u² - 2 u x + 560²)      u: its level, x: the input; the x² that is missing is the same for all states of a step
// a multiple of 2^K, so the low K bits carry the choice of the predecessor and the minimum is the argument too: ties go to the lowest. One multiply-add and one
// add-and-minimum a state. Costs of the four blocks lie side by side in shared memory, one 16-byte access for all; choices go to device memory as nibbles. Nothing
// is ever subtracted: that the steps of all passes fit 32 bits is proven beforehand (cuda_encoder.py).
//
// x int16 [blocks, 256] · levels int16 [2^L] · dims [blocks, warmup, resume] → states uint16 [blocks, 256] · history uint32 [grid, 256, 2^(L-K) / 2]
// K: 1 to 4. warmup is even; 128 with resume (viterbi.cuh). grid: thread blocks, each takes every grid-th four.
#include "cuda/viterbi_rows.cuh"
#include "cuda/viterbi_12.cuh"

tq_viterbi<TqRows<12, K, 32>>(x, levels, dims, states, history);
