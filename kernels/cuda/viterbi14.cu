// viterbi.cu at L = 14: 256 threads, one thread block a processor; history uint32 [grid, 512, 2^(L-K) / 2]. K: 2 to 4.
#include "cuda/viterbi_rows.cuh"
#include "cuda/viterbi_14.cuh"

tq_viterbi<TqRows<14, K, 64>>(x, levels, dims, states, history);
