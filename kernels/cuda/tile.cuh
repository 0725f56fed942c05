// Products with matrices in 16 x 16 tiles on the tensor cores: y = x Wᵀ for 1..4 rows of x, or silu(x Gᵀ) * (x Uᵀ) with two matrices.
//
// The value of a state is affine in the byte sum of a 32-bit hash (mul1, 1mad). So the hash itself, four unsigned bytes, is one operand of an integer matrix
// product whose other operand repeats the input four times: a shift, a mask and a multiplication are all that a weight costs; there is no byte sum, no
// conversion and no multiply-add. The inputs are fixed point, LIMBS signed bytes each that take a column of the product apiece: three (24 bits,
// relative to the largest |x|) are as exact as float32, one is int8 activations. Sums are exact integers to the very end, so that the result does not
// depend on how the work is shared out, nor on the card.
//
// The rows of tiles lie end to end and are cut into as many pieces as there are thread blocks. Pieces are WHOLE rows of tiles where that is about as even as
// equal ones: then a launch is all there is. Where a cut goes through a row of tiles, those that have a part of it add their sums up in device memory, which
// must be zeros before, and the last to come finishes the row. The warps of a block share its piece in units of
// four neighbouring tiles. Lane l of a warp decodes rows 2r and 2r+1, r = l/4, of tile l%4: 32 consecutive steps of one trellis block, which are K
// whole words and one that another lane has. (Clusters of blocks would meet in shared memory. But MLX replays graphs with other kernels in them, and a
// kernel that takes the place of one with clusters loses the blocks that do not fill a cluster: measured, mlx 0.32.4.)
#include "cuda/device.cuh"

constexpr int TQ_WARPS = 16, TQ_THREADS = 32 * TQ_WARPS;
constexpr int TQ_AHEAD = 4;    // units that are fetched ahead of those in work
constexpr int TQ_BATCH = 3;    // times four inputs that a thread has in registers
constexpr int TQ_FLUSH = 128;  // units whose sums fit 32 bits: 128 * 64 inputs * 4 bytes of 255 * 128 < 2^31

struct TqTileDims {
  int rows, cols, row_tiles, row_stride;  // row_stride: tiles in a row of tiles
  int slice;                              // units of x that shared memory holds at once
};

// Where the piece of block b begins, in 1024ths of a row of tiles, and the block that has place q.
constexpr uint32_t TQ_FINE = 1024;
template <int WHOLE> static __device__ __forceinline__ uint32_t tq_cut(uint32_t row_tiles, uint32_t b, uint32_t blocks) {
  return WHOLE ? row_tiles * b / blocks * TQ_FINE : (uint32_t)((unsigned long long)row_tiles * TQ_FINE * b / blocks);
}
static __device__ __forceinline__ uint32_t tq_block_of(uint32_t row_tiles, uint32_t q, uint32_t blocks) {
  return (uint32_t)((((unsigned long long)q + 1) * blocks - 1) / ((unsigned long long)row_tiles * TQ_FINE));
}

// Lane's 32 K bits of one tile: word i at w[i]; w[K] is the word after them.
template <int K> struct TqLane {
  uint32_t w[K + 1];
};

template <int K> static __device__ __forceinline__ void tq_load(TqLane<K> &lane, const uint32_t *p) {
  if constexpr (K == 4) {
    const uint4 v = tq_ldg(reinterpret_cast<const uint4 *>(p));
    lane.w[0] = v.x, lane.w[1] = v.y, lane.w[2] = v.z, lane.w[3] = v.w;
  } else if constexpr (K == 2) {
    const uint2 v = tq_ldg(reinterpret_cast<const uint2 *>(p));
    lane.w[0] = v.x, lane.w[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < K; i++) lane.w[i] = tq_ldg(p + i);
  }
}

// Hash of the state whose window begins `bit` bits into the lane's words. Within a word it is two shifts, the left one on the multiplier's pipe: both
// integer pipes are then about equally busy, which shift and mask are not (3 % of the whole on an H200).
template <int K, int L, int CODE> static __device__ __forceinline__ uint32_t tq_hash(const TqLane<K> &lane, int bit) {
  const int word = bit >> 5, shift = bit & 31;
  const uint32_t mask = (1u << L) - 1u, low = lane.w[word];
  uint32_t state;
  if (shift + L > 32)
    state = __funnelshift_r(low, lane.w[word + 1], shift) & mask;
  else if (shift + L == 32)
    state = low >> shift;
  else if (shift == 0)
    state = low & mask;
  else
    state = tq_mul(low, 1u << (32 - L - shift)) >> (32 - L);
  return CODE == TQ_CODE_MUL1 ? tq_hash_mul1(state) : tq_hash_1mad(state);
}

// A sum of 32-bit sums, in two halves: shared memory adds 32 bits at once, 64 only by trial.
struct TqSum {
  int low, high;
  __device__ __forceinline__ void add(int part) {
    atomicAdd(&low, part & 0xFFFF);
    atomicAdd(&high, part >> 16);
  }
  __device__ __forceinline__ long long value() const { return (long long)high * 65536 + low; }
};

template <int K, int L, int CODE, int MATRICES, int M, int LIMBS, int WHOLE, class T, class S>
static __device__ __forceinline__ void tq_tile(const uint32_t *words0, const S *scales0, const uint32_t *words1, const S *scales1, const T *x, TqTileDims d, void *out) {
  constexpr int COLUMNS = LIMBS * M, GROUPS = (COLUMNS + 7) / 8, BLOCK = 8 * K, CELLS = MATRICES * 16 * COLUMNS;  // of a row of tiles
  extern __shared__ __align__(16) unsigned char tq_shared[];
  __shared__ uint32_t largest[M];
  __shared__ long long total[M];
  __shared__ int is_last[2];
  // The compiler is to know that a warp is of one mind about its number.
  const int tid = threadIdx.x, lane = tid & 31, warp = __shfl_sync(~0u, tid >> 5, 0), r = lane >> 2, c = lane & 3;
  const uint32_t begin0 = tq_cut<WHOLE>(d.row_tiles, blockIdx.x, gridDim.x), end0 = tq_cut<WHOLE>(d.row_tiles, blockIdx.x + 1, gridDim.x);
  const int tile0 = begin0 / TQ_FINE, tiles = (end0 + TQ_FINE - 1) / TQ_FINE - tile0;
  const uint32_t furthest = (uint32_t)d.row_tiles * d.row_stride * BLOCK - K;  // no tile is read behind the last one; what it holds meets inputs that are 0
  const int units = (d.row_stride + 3) >> 2, sums = tiles * CELLS;
  TqSum *acc = reinterpret_cast<TqSum *>(tq_shared);  // [tile][matrix][row][column]
  uint4 *xs = reinterpret_cast<uint4 *>(tq_shared + (((size_t)sums * sizeof(TqSum) + 15) & ~(size_t)15));  // [unit][quarter of a tile][column][tile of the unit]: 4 inputs, each byte 4 times
  T *y = reinterpret_cast<T *>(out);
  unsigned long long *shared_sums = reinterpret_cast<unsigned long long *>(out) + ((size_t)M * d.rows * sizeof(T) + 7) / 8;  // [first block of the row][cell]
  uint32_t *arrived = reinterpret_cast<uint32_t *>(shared_sums + (size_t)gridDim.x * CELLS);

  // This warp's share of a slice: units first..last of [tile][matrix][unit], fetched in batches. All of a batch at once: one wait for what was asked
  // for a batch ago. Past the end of the share the last words again.
  int here, first, last, fetch_tile, fetch_unit, fetch_left, fetch_total;
  const uint32_t *from = words0;
  uint32_t offset = 0;  // in words
  TqLane<K> ahead[TQ_AHEAD], now[TQ_AHEAD];
  auto fetch = [&](int slice0) {
    if (fetch_left >= TQ_AHEAD) {
#pragma unroll
      for (int i = 0; i < TQ_AHEAD; i++) tq_load<K>(ahead[i], from + (min(offset + i * 4 * BLOCK, furthest)));
      offset += TQ_AHEAD * 4 * BLOCK, fetch_left -= TQ_AHEAD;
      return;
    }
#pragma unroll
    for (int i = 0; i < TQ_AHEAD; i++) {
      if (fetch_left == 0 && fetch_total > 0) {  // the next row of tiles
        fetch_left = min(here - fetch_unit, fetch_total);
        from = MATRICES == 2 && (fetch_tile & 1) ? words1 : words0;
        offset = ((uint32_t)(tile0 + fetch_tile / MATRICES) * d.row_stride + (slice0 + fetch_unit) * 4 + c) * BLOCK + (7 - r) * K;
        fetch_total -= fetch_left, fetch_unit = 0, fetch_tile++;
      }
      tq_load<K>(ahead[i], from + min(offset, furthest));
      if (fetch_left) offset += 4 * BLOCK, fetch_left--;
    }
  };
  auto begin = [&](int slice0) {
    here = min(d.slice, units - slice0);
    const uint32_t row = MATRICES * here, from0 = begin0 % TQ_FINE * row / TQ_FINE, to = (end0 / TQ_FINE - tile0) * row + end0 % TQ_FINE * row / TQ_FINE, share = to - from0;
    first = from0 + share * warp / TQ_WARPS, last = from0 + share * (warp + 1) / TQ_WARPS;
    fetch_tile = first / here, fetch_unit = first - fetch_tile * here, fetch_left = 0, fetch_total = last - first;
    fetch(slice0);
  };
  begin(0);

  // Inputs: TQ_BATCH times four a thread. Neighbouring threads take neighbouring tiles, whose cells in shared memory are neighbours.
  TqFour<T> in[M][TQ_BATCH];
  auto load = [&](int m, int slice0, int g0) {
#pragma unroll
    for (int i = 0; i < TQ_BATCH; i++) {
      const int g = g0 + i * TQ_THREADS;
      in[m][i].load(x + (size_t)m * d.cols, ((slice0 + (g >> 4)) * 4 + (g & 3)) * 16 + (g >> 2 & 3) * 4, d.cols);
    }
  };
#pragma unroll
  for (int m = 0; m < M; m++) load(m, 0, tid);
  for (int i = tid; i < sums; i += TQ_THREADS) acc[i] = {0, 0};
  if (tid < M) largest[tid] = 0, total[tid] = 0;
  __syncthreads();
  // Largest |x| of each row, by its bits: what is not finite comes out on top.
#pragma unroll
  for (int m = 0; m < M; m++) {
    uint32_t most = 0;
    for (int g0 = tid;;) {
#pragma unroll
      for (int i = 0; i < TQ_BATCH; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) most = max(most, __float_as_uint(in[m][i][e]) & 0x7FFFFFFFu);
      if ((g0 += TQ_BATCH * TQ_THREADS) >= units * 16) break;
      load(m, 0, g0);
    }
    most = __reduce_max_sync(~0u, most);
    if (lane == 0) atomicMax(&largest[m], most);
  }
  __syncthreads();

  int sum[GROUPS][2][4] = {};
  for (int slice0 = 0; slice0 < units; slice0 += d.slice) {
    if (slice0 != 0) {
      begin(slice0);
      __syncthreads();
    }
    // The slice of x as limbs, and the sum of all fixed-point inputs, which the code's mean multiplies.
#pragma unroll
    for (int m = 0; m < M; m++) {
      const float to_fixed = tq_to_fixed<LIMBS>(largest[m]);
      int part = 0;  // at most 256 inputs a thread, see supports()
      for (int g0 = tid; g0 < here * 16; g0 += TQ_BATCH * TQ_THREADS) {
        if (slice0 != 0 || units * 16 > TQ_BATCH * TQ_THREADS) load(m, slice0, g0);
#pragma unroll
        for (int i = 0; i < TQ_BATCH; i++) {
          const int g = g0 + i * TQ_THREADS, unit = g >> 4, quarter = g >> 2 & 3, column = g & 3;
          if (unit >= here) break;
          uint4 *cell = xs + ((unit * 4 + quarter) * COLUMNS + m * LIMBS) * 4 + column;
          uint32_t packed[LIMBS] = {};
#pragma unroll
          for (int e = 0; e < 4; e++) {
            int q = __float2int_rn(in[m][i][e] * to_fixed);
            part += q;
#pragma unroll
            for (int l = 0; l < LIMBS; l++) {
              const int limb = l + 1 < LIMBS ? (int)(signed char)q : q;
              packed[l] |= (uint32_t)(limb & 255) << (8 * e);
              q = (q - limb) >> 8;
            }
          }
#pragma unroll
          for (int l = 0; l < LIMBS; l++)
            cell[l * 4] = make_uint4(__byte_perm(packed[l], 0, 0x0000), __byte_perm(packed[l], 0, 0x1111), __byte_perm(packed[l], 0, 0x2222), __byte_perm(packed[l], 0, 0x3333));
        }
      }
      const long long all = tq_warp_sum((long long)part);
      if (lane == 0) atomicAdd(reinterpret_cast<unsigned long long *>(&total[m]), (unsigned long long)all);
    }
    __syncthreads();

    int tile = first / here, unit = first - tile * here, todo = last - first, left = min(here - unit, min(todo, TQ_FLUSH));
    const uint4 *cell = xs + (size_t)unit * 16 * COLUMNS + c;
    unit += left, todo -= left;
    while (left > 0) {
#pragma unroll
      for (int slot = 0; slot < TQ_AHEAD; slot++) {
        now[slot] = ahead[slot];
        now[slot].w[K] = __shfl_sync(~0u, now[slot].w[0], (lane + 28) & 31);  // lane l-4 has the steps before; the first ones follow the last
      }
      fetch(slice0);
#pragma unroll
      for (int slot = 0; slot < TQ_AHEAD; slot++) {
#pragma unroll
        for (int i4 = 0; i4 < 4; i4++) {
          uint4 in[GROUPS];
#pragma unroll
          for (int g = 0; g < GROUPS; g++) in[g] = cell[(i4 * COLUMNS + min(8 * g + r, COLUMNS - 1)) * 4];
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int i = 4 * i4 + 2 * half;  // inputs i, i+1 of the lane's rows 2r (steps 0..15 of its 32) and 2r+1
            const uint32_t a0 = tq_hash<K, L, CODE>(now[slot], (31 - i) * K), a1 = tq_hash<K, L, CODE>(now[slot], (15 - i) * K);
            const uint32_t a2 = tq_hash<K, L, CODE>(now[slot], (30 - i) * K), a3 = tq_hash<K, L, CODE>(now[slot], (14 - i) * K);
#pragma unroll
            for (int g = 0; g < GROUPS; g++) tq_imma(sum[g][half], a0, a1, a2, a3, half ? in[g].z : in[g].x, half ? in[g].w : in[g].y);
          }
        }
        cell += 16 * COLUMNS;
        if (--left) continue;
        // The end of a row of tiles, of this warp's share, or of what 32 bits hold.
        TqSum *place = acc + (tile * 16 + 2 * r) * COLUMNS;
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const int column = 8 * g + 2 * c + (j & 1);
            if (column < COLUMNS) place[(j >> 1) * COLUMNS + column].add(sum[g][0][j] + sum[g][1][j]);
            sum[g][0][j] = sum[g][1][j] = 0;
          }
        if (unit == here) unit = 0, tile++, cell = xs + c;
        left = min(here - unit, min(todo, TQ_FLUSH));
        if (left == 0) break;
        unit += left, todo -= left;
      }
    }
  }

  // Rows of tiles that other blocks have a part of: the first of ours, the last, or both are one.
  __syncthreads();
  const bool cut[2] = {!WHOLE && begin0 % TQ_FINE != 0, !WHOLE && end0 % TQ_FINE != 0 && !(tiles == 1 && begin0 % TQ_FINE != 0)};
  if constexpr (!WHOLE) {
#pragma unroll
    for (int side = 0; side < 2; side++) {
      if (!cut[side]) continue;
      const int tile = side ? tiles - 1 : 0;
      unsigned long long *place = shared_sums + (size_t)tq_block_of(d.row_tiles, (tile0 + tile) * TQ_FINE, gridDim.x) * CELLS;
      for (int i = tid; i < CELLS; i += TQ_THREADS) atomicAdd(place + i, (unsigned long long)acc[tile * CELLS + i].value());
    }
    __threadfence();
    __syncthreads();
    if (tid < 2) {
      is_last[tid] = 0;
      if (cut[tid]) {
        const uint32_t at = (tile0 + (tid ? tiles - 1 : 0)) * TQ_FINE, from_block = tq_block_of(d.row_tiles, at, gridDim.x), to_block = tq_block_of(d.row_tiles, at + TQ_FINE - 1, gridDim.x);
        is_last[tid] = atomicAdd(arrived + from_block, 1u) == to_block - from_block;
        __threadfence();
      }
    }
    __syncthreads();
  }
  for (int e = tid; e < tiles * 16 * M; e += TQ_THREADS) {
    const int m = e / (tiles * 16), at = e - m * tiles * 16, tile = at >> 4, row = tile0 * 16 + at;
    const bool is_cut = (tile == 0 && cut[0]) || (tile == tiles - 1 && cut[1]);
    if (row >= d.rows || (is_cut && !is_last[tile == 0 && cut[0] ? 0 : 1])) continue;
    const unsigned long long *theirs = shared_sums + (is_cut ? (size_t)tq_block_of(d.row_tiles, (tile0 + tile) * TQ_FINE, gridDim.x) * CELLS : 0);
    float value[MATRICES];
#pragma unroll
    for (int q = 0; q < MATRICES; q++) {
      const int place = (q * 16 + (at & 15)) * COLUMNS + m * LIMBS;
      long long z = -TQ_BYTE_SUM_MEAN * total[m];
#pragma unroll
      for (int l = 0; l < LIMBS; l++) z += (is_cut ? (long long)__ldcg(theirs + place + l) : acc[tile * CELLS + place + l].value()) * (1ll << (8 * l));
      const float unit = CODE == TQ_CODE_MUL1 ? TQ_MUL1_INVERSE_UNIT : TQ_1MAD_INVERSE_UNIT;
      value[q] = (float)z * tq_from_fixed<LIMBS>(largest[m]) * ((float)(q ? scales1 : scales0)[row] * unit);
    }
    y[(size_t)m * d.rows + row] = tq_cast<T>(MATRICES == 2 ? value[0] / (1.f + expf(-value[0])) * value[1] : value[0]);
  }
}

// MLX writes `__global__ void name(` in front of a body: this is where its attributes can be said. Without bounds the compiler takes more
// registers than 512 threads have.
#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__(TQ_THREADS, 1)
