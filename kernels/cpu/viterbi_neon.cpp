// viterbi_neon
