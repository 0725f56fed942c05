// Steps of L = 12 and 14: 32 states a thread, two rows of costs. See viterbi.cu.
#include "cuda/viterbi.cuh"

template <int L, int K, int STATES> struct TqRows {
  static constexpr int BITS = K, BLOCKS = 4, D = 1 << K, J = 1 << (L - K), THREADS = (1 << L) / STATES, INPUT = -2 * D;
  static constexpr int N = STATES / D, A = N < D ? N : D, GROUPS = N / A;  // suffixes of a thread, those that share predecessors, how often
  static constexpr int C = A > 4 ? A : N < 4 ? N : 4;                 // suffixes at once, A or 2 A of them
  static constexpr int P = N < 4 ? N : 4;                             // suffixes whose choices lie together
  static constexpr int ROW = 2 * J, COST_BYTES = 2 * J * 16;          // bytes of choices of a step, of costs
  static constexpr bool ASIDE = THREADS > 128;                        // the way back is walked during the steps of the next blocks; of small thread blocks others work meanwhile
  // Of the way back. What is written there decides whether ptxas 13.0 keeps the four inputs of a step in registers of the warp: if so, L = 12 is 14 % faster (docs/log.md).
  static constexpr int UNROLLED = K == 4 || L > 12 ? 4 : 1;
  using Word = uint4;
  uint32_t level[D * N], square[D * N];
  int read, write;

  // Cells of 16 bytes, so placed that neither the reads of a step nor its writes meet in a bank.
  static __device__ __forceinline__ int place(int j) { return j ^ ((j >> 3) & (N - 1)); }

  // Byte of the choice of suffix j for block b (its nibble: the low bit of b).
  static __device__ __forceinline__ int choice(int j, int b) { return j + (j & -P) + (b >> 1) * P; }

  // Through memory of its own, so that no compiler works values out again, at every step, to save registers.
  static __device__ __forceinline__ uint32_t kept(uint32_t value, volatile uint32_t *through) { return *through = value, *through; }

  __device__ __forceinline__ TqRows(const int16_t *levels, volatile uint32_t *through) {
    const int first = threadIdx.x * N;
    read = place(first >> K), write = place(first);
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
      for (int d = 0; d < D; d++)
#pragma unroll
        for (int i = 0; i < A; i++) {
          const int u = levels[d * J + first + g * A + i], w = (g * D + d) * A + i;
          level[w] = kept(u, through), square[w] = kept(D * (u * u + TQ_MOST * TQ_MOST) + d, through);
        }
  }

  __device__ __forceinline__ void fill(uint4 *costs, uint32_t cost) {
#pragma unroll
    for (int i = 0; i < N; i++) costs[write ^ i ^ (i >> 3)] = make_uint4(cost, cost, cost, cost);
  }
  __device__ __forceinline__ uint32_t *cost(uint4 *costs, int j, int b) const { return reinterpret_cast<uint32_t *>(&costs[place(j)]) + b; }

  __device__ __forceinline__ void step(uint4 *costs, uint4 input, int number, bool keep, unsigned char *choices) {
    uint32_t in[4], packed[N >= 2 ? N / 2 : 1];
    tq_unpack(input, in);
    const int row = (number & 1) * J;  // passes begin and end at even steps
#pragma unroll
    for (int c = 0; c < N; c += C) {
      uint32_t best[C < 4 ? 4 : C][4];
#pragma unroll
      for (int g = c / A; g < (c + C) / A; g++)
#pragma unroll
        for (int d = 0; d < D; d++) {
          uint32_t before[4];
          tq_unpack(costs[row + (GROUPS > 1 ? read ^ g : read) + d * (J >> K)], before);
#pragma unroll
          for (int i = 0; i < A; i++)
#pragma unroll
            for (int b = 0; b < 4; b++) {
              const int w = (g * D + d) * A + i;
              const uint32_t cost = tq_mul_add(level[w], in[b], square[w]);
              uint32_t &least = best[g * A + i - c][b];
              least = d == 0 ? before[b] + cost : tq_add_min(before[b], cost, least);
            }
        }
#pragma unroll
      for (int i = 0; i < C; i++) {
        uint32_t out[4];
#pragma unroll
        for (int b = 0; b < 4; b++) out[b] = best[i][b] & ~(uint32_t)(D - 1);
        costs[(row ^ J) + (write ^ (c + i) ^ ((c + i) >> 3))] = tq_cell(out);
      }
      if constexpr (C >= 4) {
#pragma unroll
        for (int i = 0; i < C; i += 4) tq_pack_choices(*reinterpret_cast<const uint32_t (*)[4][4]>(&best[i]), packed + (c + i) / 2);
      } else {
        uint32_t bytes[4];
#pragma unroll
        for (int b = 0; b < 4; b++) bytes[b] = __byte_perm(best[0][b], best[1][b], 0x0040);
        const uint32_t low = __byte_perm(bytes[0], bytes[2], 0x5410), high = __byte_perm(bytes[1], bytes[3], 0x5410);
        packed[0] = (low & 0x0F0F0F0Fu) | ((high << 4) & 0xF0F0F0F0u);
      }
    }
    if (keep) tq_store_choices(choices + threadIdx.x * (2 * N), packed);
  }
};
