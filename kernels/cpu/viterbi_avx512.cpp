// viterbi_avx512
