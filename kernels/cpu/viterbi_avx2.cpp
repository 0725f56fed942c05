// viterbi_avx2
