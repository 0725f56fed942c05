// Choice of the encoder at run time, and the proof obligations of its float32 costs.
#include <cstring>

#include "cpu/viterbi.h"

namespace tq {

int renormalise_every(const Trellis &t, const float *x) {
  const int span = (t.window - t.bits + t.bits - 1) / t.bits, T = t.block;
  auto worst = [&](int i) {
    const float up = t.highest - x[i % T], down = x[i % T] - t.lowest, far = up > down ? up : down;
    return (double)far * far;
  };
  for (int steps = 16; steps >= 1; steps--) {
    double sum = 0, largest = 0;
    for (int i = 0; i < span + steps; i++) sum += worst(i);
    for (int i = 0; i < T; i++) {
      if (sum > largest) largest = sum;
      sum += worst(i + span + steps) - worst(i);
    }
    if (largest < 16777216.0) return steps;
  }
  return 0;
}

size_t scratch_floats(const Trellis &t) {
  const size_t J = (size_t)1 << (t.window - t.bits);
  return 2 * J * (size_t)(t.block + 3) + 64;
}

EncodeBlock select_encoder(int bits, int window, const char *force, const char **name) {
  struct Choice {
    const char *name;
    EncodeBlock run;
  } choices[3];
  int n = 0;
#if defined(__x86_64__) || defined(_M_X64)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    choices[n++] = {"avx512", encode_block_avx512(bits, window)};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) choices[n++] = {"avx2", encode_block_avx2(bits, window)};
#elif defined(__aarch64__) || defined(_M_ARM64)
  choices[n++] = {"neon", encode_block_neon(bits, window)};
#endif
  choices[n++] = {"scalar", encode_block_scalar(bits, window)};
  for (int i = 0; i < n; i++)
    if (choices[i].run && (!force || !std::strcmp(force, choices[i].name))) {
      *name = choices[i].name;
      return choices[i].run;
    }
  return nullptr;
}

}  // namespace tq
