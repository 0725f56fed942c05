// Steps of L = 16: 256 states a thread, their levels two in a register, one row of costs. See viterbi16.cu.
#include "cuda/viterbi.cuh"

template <int L, int K> struct TqInPlace {
  static constexpr int BITS = K, BLOCKS = K == 2 ? 2 : 4, D = 1 << K, W = L - K, J = 1 << W, THREADS = (1 << L) / 256;
  static constexpr int ROOT = K == 2 ? 2 : 4, INPUT = -2 * ROOT;  // of what costs are multiples of, at least D
  static constexpr int GROUPS = 256 / D / D;                      // of D suffixes that share D predecessors
  static constexpr int ROW = J * BLOCKS / 2, COST_BYTES = J * BLOCKS * 4;
  static constexpr bool ASIDE = true;  // see TqRows
  static constexpr int UNROLLED = 4;
  using Word = typename TqCell<BLOCKS>::Word;
  uint32_t levels[128];
  int turn;

  static __device__ __forceinline__ int turned(int j, int by) { return ((j << by) | (j >> (W - by))) & (J - 1); }
  // Linear over the bits, and so that eight neighbours (sixteen cells of 8 bytes) lie in different banks, however turned.
  static __device__ __forceinline__ int place(int j) {
    return BLOCKS == 4 ? j ^ (((j >> 3) ^ (j >> 6) ^ (j >> 9) ^ (j >> 12)) & 7) : j ^ (((j >> 4) ^ (j >> 8) ^ (j >> 12)) & 15);
  }
  static __device__ __forceinline__ int choice(int j, int b) { return j + (BLOCKS == 4 ? j & -4 : 0) + (b >> 1) * 4; }

  __device__ __forceinline__ TqInPlace(const int16_t *table, volatile uint32_t *) {
    turn = 0;
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
      for (int d = 0; d < D; d++)
#pragma unroll
        for (int i = 0; i < D; i += 2) {
          const int16_t *u = table + d * J + (g * THREADS + (int)threadIdx.x) * D + i;
          levels[((g * D + d) * D + i) / 2] = ((uint32_t)(ROOT * u[0]) & 0xFFFFu) | (uint32_t)(ROOT * u[1]) << 16;
        }
  }

  __device__ __forceinline__ void fill(Word *costs, uint32_t cost) {
    turn = 0;
    uint32_t words[BLOCKS];
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) words[b] = cost;
    for (int i = threadIdx.x; i < J; i += THREADS) costs[i] = tq_cell(words);
  }
  __device__ __forceinline__ uint32_t *cost(Word *costs, int j, int b) const { return reinterpret_cast<uint32_t *>(&costs[place(turned(j, turn))]) + b; }

  __device__ __forceinline__ void step(Word *costs, Word input, int, bool keep, unsigned char *choices) {
    uint32_t in[BLOCKS];
    tq_unpack(input, in);
    const uint32_t never = (uint32_t)turn >> 8;
    // Suffix j lies where turning its bits by `turn` says. The D predecessors of a group of suffixes are read by nobody else, so the group moves in there; with that
    // suffixes are turned K bits further back.
    int of_choice[D], of_group[GROUPS];
#pragma unroll
    for (int d = 0; d < D; d++) of_choice[d] = d & (d - 1) ? of_choice[d & (d - 1)] ^ of_choice[d & -d] : d ? place(turned(d << (W - K), turn)) : 0;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) of_group[g] = g & (g - 1) ? of_group[g & (g - 1)] ^ of_group[g & -g] : g ? place(turned(g * THREADS, turn)) : 0;
    const int base = place(turned(threadIdx.x, turn));
    Word cells[D];
#pragma unroll
    for (int d = 0; d < D; d++) cells[d] = costs[base ^ of_choice[d]];
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      uint32_t best[D][BLOCKS];
      const int at = base ^ of_group[g];
#pragma unroll
      for (int d = 0; d < D; d++) {
        uint32_t before[BLOCKS];
        tq_unpack(cells[d], before);
        if (g + 1 < GROUPS) cells[d] = costs[base ^ of_group[g + 1 < GROUPS ? g + 1 : 0] ^ of_choice[d]];
#pragma unroll
        for (int i = 0; i < D; i++) {
          const uint32_t pair = levels[((g * D + d) * D + i) / 2], level = tq_half(pair, i & 1, never);
          const uint32_t square = tq_mul_add(level, level, (uint32_t)(ROOT * ROOT * TQ_MOST * TQ_MOST + d));
#pragma unroll
          for (int b = 0; b < BLOCKS; b++) {
            const uint32_t cost = tq_mul_add(level, in[b], square);
            best[i][b] = d == 0 ? before[b] + cost : tq_add_min(before[b], cost, best[i][b]);
          }
        }
      }
      uint32_t packed[D * BLOCKS / 8];
#pragma unroll
      for (int i = 0; i < D; i++) {
        uint32_t out[BLOCKS];
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) out[b] = best[i][b] & ~(uint32_t)(ROOT * ROOT - 1);
        costs[at ^ of_choice[i]] = tq_cell(out);
        if (i % 4 == 0) tq_pack_choices(*reinterpret_cast<const uint32_t (*)[4][BLOCKS]>(&best[i]), packed + i * BLOCKS / 8);
      }
      if (keep) tq_store_choices(choices + (size_t)(g * THREADS + threadIdx.x) * (D * BLOCKS / 2), packed);
    }
    turn = turn >= K ? turn - K : turn + W - K;
  }
};
