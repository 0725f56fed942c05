// Viterbi steps in plain C++: every shape with L >= 2k, every machine.
#include "cpu/viterbi.h"

namespace {
template <class Cost> struct Scalar {
  using reg = Cost;
  using cost = Cost;
  static constexpr int width = 1;
  static reg set1(Cost v) { return v; }
  static reg load(const Cost *p) { return *p; }
  static reg level(const float *p) { return *p; }
  static void store(Cost *p, reg v) { *p = v; }
  static reg sub(reg a, reg b) { return a - b; }
  static reg fma(reg a, reg b, reg c) { return a * b + c; }  // exact with or without contraction: all values are integers in range
  static reg min(reg a, reg b) { return b < a ? b : a; }
  static Cost lowest(reg v) { return v; }
  template <int K> static reg spread(const Cost *p) { return *p; }
};
#include "cpu/viterbi.inl"
}  // namespace

tq::EncodeBlock tq::encode_block_scalar(int bits, int window) { return pick<Scalar<float>>(bits, window); }
tq::EncodeBlock tq::encode_block_wide(int bits, int window) { return pick<Scalar<double>>(bits, window); }
