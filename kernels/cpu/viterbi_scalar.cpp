// viterbi_scalar
