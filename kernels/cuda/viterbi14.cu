// viterbi.cu at L = 14: 512 threads, one thread block a processor. K: 2 to 4.
#include "cuda/viterbi_rows.cuh"
#include "cuda/viterbi_14.cuh"

tq_viterbi<TqRows<14, K, 64>>(x, levels, dims, states, history);
