// Tail-biting Viterbi search on the bitshift trellis (QTIP, arXiv 2406.11235, Algorithm 4), one block at a time per thread.
//
//   state' = ((state << k) | b) mod 2^L      metric of a step: (u[state] - x)^2, u and x integers
//
// The suffix j = state mod 2^(L-k) is all that the next step sees, so costs are kept per suffix:
//   m'[j] = min over d in [0, 2^k) of  m[s >> k] + (u[s] - x)^2,   s = (d << (L-k)) | j
// Ties: the lowest d; at the free end of pass 1 the lowest j. DESIGN §6 states the metric as D*(u^2 - 2ux + X^2); it differs from this
// one by a constant per step and a factor, so every comparison, hence every state, is the same.
//
// Costs are float32 holding integers. They stay exact because they are renormalised (minimum subtracted) before they can reach 2^24;
// `renormalise_every` proves it for each block from its own inputs, and a block for which it cannot is searched in float64.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tq {

constexpr int kMaxAbsX = 560;  // inputs are clipped to +-560 units (3.8 sigma of the code)

struct Trellis {
  int window;           // L
  int bits;             // k
  int block;            // T, steps of one tail-biting block
  int warmup;           // pass 1 runs over [-warmup, warmup) around the seam; block/2 is Algorithm 4
  const float *levels;  // [2^L] integer code values u, 64-byte aligned
  float lowest, highest;  // of levels
};

// Largest number of steps (at most 16) between renormalisations that keeps every cost of this block below 2^24, or 0 if none does.
// Any suffix is at most R = ceil((L-k)/k) steps from the best one, so a row spans at most what R steps can cost; g steps later it has
// grown by at most those. x: [block].
int renormalise_every(const Trellis &t, const float *x);

// Floats of scratch that one thread needs for `t` (enough for float64 costs too).
size_t scratch_floats(const Trellis &t);

// Encode one block. x: [block] integers in [-560, 560] as float; renormalise: steps between renormalisations; states: [block] out;
// scratch: 64-byte aligned.
using EncodeBlock = void (*)(const Trellis &t, const float *x, int renormalise, uint16_t *states, float *scratch);

EncodeBlock encode_block_scalar(int bits, int window);
EncodeBlock encode_block_wide(int bits, int window);     // scalar with float64 costs: exact for every input
EncodeBlock encode_block_avx2(int bits, int window);     // nullptr where the shape is too small for the vectors
EncodeBlock encode_block_avx512(int bits, int window);
EncodeBlock encode_block_neon(int bits, int window);

// Best implementation for this machine; `name` receives "avx512", "avx2", "neon" or "scalar".
// `force` (may be null) names one of them; nullptr is returned when it is not available.
EncodeBlock select_encoder(int bits, int window, const char *force, const char **name);

}  // namespace tq
