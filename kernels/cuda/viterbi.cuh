// See viterbi.cu.
#include "cuda/device.cuh"

constexpr int TQ_L = 12, TQ_T = 256, TQ_FOUR = 4, TQ_SEARCHERS = 128, TQ_MOST = 560, TQ_CHUNK = 16;
constexpr uint32_t TQ_UNREACHED = 1u << 28;  // more than two paths of a few steps can differ by

template <int K> struct TqSearch {
  static constexpr int D = 1 << K, J = 1 << (TQ_L - K), SUFFIXES = (1 << TQ_L) / TQ_SEARCHERS / D;  // of a thread
  static constexpr int AT_ONCE = SUFFIXES < D ? SUFFIXES : D, GROUPS = SUFFIXES / AT_ONCE;           // suffixes that share predecessors
  static constexpr int ROW = 2 * J;                                                                  // bytes of choices of a step
  // Cells of 16 bytes, so placed that neither the reads of a step nor its writes meet in a bank.
  static __device__ __forceinline__ int place(int j) { return j ^ ((j >> 3) & (SUFFIXES - 1)); }
};

// Low nibbles of four words' low bytes, blocks 0 and 1 (2 and 3) of a suffix in one byte.
template <int N> static __device__ __forceinline__ void tq_pack_choices(const uint32_t (&best)[N][TQ_FOUR], uint32_t (&packed)[N / 2]) {
  if constexpr (N >= 4) {
#pragma unroll
    for (int h = 0; h < N / 4; h++) {
      uint32_t bytes[TQ_FOUR];
#pragma unroll
      for (int b = 0; b < TQ_FOUR; b++) bytes[b] = __byte_perm(__byte_perm(best[4 * h][b], best[4 * h + 1][b], 0x0040), __byte_perm(best[4 * h + 2][b], best[4 * h + 3][b], 0x0040), 0x5410);
      packed[2 * h] = (bytes[0] & 0x0F0F0F0Fu) | ((bytes[1] << 4) & 0xF0F0F0F0u);
      packed[2 * h + 1] = (bytes[2] & 0x0F0F0F0Fu) | ((bytes[3] << 4) & 0xF0F0F0F0u);
    }
  } else {
    uint32_t bytes[TQ_FOUR];
#pragma unroll
    for (int b = 0; b < TQ_FOUR; b++) bytes[b] = __byte_perm(best[0][b], best[1][b], 0x0040);
    const uint32_t low = __byte_perm(bytes[0], bytes[2], 0x5410), high = __byte_perm(bytes[1], bytes[3], 0x5410);
    packed[0] = (low & 0x0F0F0F0Fu) | ((high << 4) & 0xF0F0F0F0u);
  }
}

// Place of a suffix's choice, and the nibble's, among the bytes of a step, for block b of the four.
template <int K> static __device__ __forceinline__ int tq_choice(const unsigned char *step, int j, int b) {
  constexpr int N = TqSearch<K>::SUFFIXES;
  const int at = N >= 4 ? (j >> 2) * 8 + (b >> 1) * 4 + (j & 3) : (j >> 1) * 4 + (b >> 1) * 2 + (j & 1);
  return (step[at] >> (4 * (b & 1))) & (TqSearch<K>::D - 1);
}

template <int K>
static __device__ __forceinline__ void tq_viterbi(const int16_t *x, const int16_t *levels, int blocks, int warmup, uint16_t *states, uint32_t *history) {
  using S = TqSearch<K>;
  constexpr int D = S::D, J = S::J, N = S::SUFFIXES, A = S::AT_ONCE;
  __shared__ uint4 costs[2 * J];
  __shared__ uint4 inputs[TQ_T];
  __shared__ uint16_t found[TQ_FOUR][TQ_T];
  const int t = threadIdx.x, own = t >> 5, lane = t & 31, first = t * N;
  unsigned char *choices = reinterpret_cast<unsigned char *>(history) + (size_t)blockIdx.x * TQ_T * S::ROW;
  uint32_t level[D * N], square[D * N];
#pragma unroll
  for (int g = 0; g < S::GROUPS; g++)
#pragma unroll
    for (int d = 0; d < D; d++)
#pragma unroll
      for (int i = 0; i < A; i++) {
        const int u = levels[d * J + first + g * A + i], w = (g * D + d) * A + i;
        level[w] = (uint32_t)u, square[w] = (uint32_t)(D * (u * u + TQ_MOST * TQ_MOST));
      }
  // The cost of a suffix as a predecessor carries, in its low bits, which of a state's 2^K predecessors it is.
  const uint32_t tag = first >> (TQ_L - 2 * K);
  const int read = S::place(first >> K), write = S::place(first);

  for (int q0 = blockIdx.x * TQ_FOUR; q0 < blocks; q0 += gridDim.x * TQ_FOUR) {
    __syncthreads();
    for (int i = t; i < TQ_FOUR * TQ_T; i += TQ_SEARCHERS)
      reinterpret_cast<uint32_t *>(&inputs[i % TQ_T])[i / TQ_T] = q0 + i / TQ_T < blocks ? (uint32_t)(-2 * D * (int)x[(size_t)q0 * TQ_T + i]) : 0u;
    int seam = 0;
    for (int pass = 0; pass < 2; pass++) {
      // Pass 0 runs over the seam with free ends, to say which suffix stands there. Pass 1 is pinned to it at both ends.
      const int begin = pass ? 0 : TQ_T - warmup, steps = pass ? TQ_T : 2 * warmup, skip = pass ? 0 : warmup;
#pragma unroll
      for (int i = 0; i < N; i++) {
        const uint32_t cost = (pass ? TQ_UNREACHED : 0u) | tag;
        costs[write ^ i] = make_uint4(cost, cost, cost, cost);
      }
      __syncthreads();
      if (pass && lane == 0) reinterpret_cast<uint32_t *>(&costs[S::place(seam)])[own] -= TQ_UNREACHED;
      __syncthreads();
      int row = 0;
      for (int s = 0; s < steps; s++) {
        const uint4 four = inputs[(begin + s) % TQ_T];
        const uint32_t in[TQ_FOUR] = {four.x, four.y, four.z, four.w};
        uint32_t best[N][TQ_FOUR];
#pragma unroll
        for (int g = 0; g < S::GROUPS; g++)
#pragma unroll
          for (int d = 0; d < D; d++) {
            const uint4 cell = costs[row + (S::GROUPS > 1 ? read ^ g : read) + d * (J >> K)];
            const uint32_t before[TQ_FOUR] = {cell.x, cell.y, cell.z, cell.w};
#pragma unroll
            for (int i = 0; i < A; i++)
#pragma unroll
              for (int b = 0; b < TQ_FOUR; b++) {
                const int w = (g * D + d) * A + i;
                const uint32_t cost = level[w] * in[b] + square[w];
                uint32_t &least = best[g * A + i][b];
                least = d == 0 ? before[b] + cost : tq_add_min(before[b], cost, least);
              }
          }
        row ^= J;
#pragma unroll
        for (int i = 0; i < N; i++) {
          uint32_t out[TQ_FOUR];
#pragma unroll
          for (int b = 0; b < TQ_FOUR; b++) out[b] = (best[i][b] & ~(uint32_t)(D - 1)) | tag;
          costs[row + (write ^ i)] = make_uint4(out[0], out[1], out[2], out[3]);
        }
        if (s >= skip) {
          uint32_t packed[N / 2];
          tq_pack_choices<N>(best, packed);
          unsigned char *to = choices + (size_t)s * S::ROW + t * (2 * N);
          if constexpr (N == 8) __stcg(reinterpret_cast<uint4 *>(to), make_uint4(packed[0], packed[1], packed[2], packed[3]));
          else if constexpr (N == 4) __stcg(reinterpret_cast<uint2 *>(to), make_uint2(packed[0], packed[1]));
          else __stcg(reinterpret_cast<uint32_t *>(to), packed[0]);
        }
        __syncthreads();
      }
      int j = seam;
      if (pass == 0) {  // each warp: the lowest suffix of the lowest cost of its block
        uint32_t least = ~0u;
        j = 0;
        for (int i = lane; i < J; i += 32) {
          const uint32_t cost = reinterpret_cast<const uint32_t *>(&costs[row + S::place(i)])[own] & ~(uint32_t)(D - 1);
          if (cost < least) least = cost, j = i;
        }
        for (int step = 16; step; step >>= 1) {
          const uint32_t cost = __shfl_xor_sync(~0u, least, step);
          const int other = __shfl_xor_sync(~0u, j, step);
          if (cost < least || (cost == least && other < j)) least = cost, j = other;
        }
      }
      const unsigned char *chunk = reinterpret_cast<const unsigned char *>(costs);  // the costs are not needed any more
      for (int top = steps; top > skip; top -= TQ_CHUNK) {
        __syncthreads();
        for (int i = t; i < S::ROW * TQ_CHUNK / 16; i += TQ_SEARCHERS) costs[i] = __ldcg(reinterpret_cast<const uint4 *>(choices + (size_t)(top - TQ_CHUNK) * S::ROW) + i);
        __syncthreads();
#pragma unroll 4
        for (int s = TQ_CHUNK - 1; s >= 0; s--) {
          const int state = tq_choice<K>(chunk + s * S::ROW, j, own) * J | j;
          if (pass && lane == 0) found[own][top - TQ_CHUNK + s] = (uint16_t)state;
          j = state >> K;
        }
      }
      seam = j;
      __syncthreads();
    }
    for (int i = t; i < TQ_FOUR * TQ_T / 2; i += TQ_SEARCHERS)
      if (q0 + i / (TQ_T / 2) < blocks) reinterpret_cast<uint32_t *>(states)[(size_t)q0 * (TQ_T / 2) + i] = reinterpret_cast<const uint32_t *>(found)[i];
  }
}

// Four thread blocks a processor.
#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__(TQ_SEARCHERS, 4)
