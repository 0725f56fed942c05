// Products with matrices in 16 x 16 tiles on the tensor cores: y = x Wᵀ for 1..4 rows of x, or silu(x Gᵀ) * (x Uᵀ) with two matrices.
//
// The value of a state is affine in the byte sum of a 32-bit hash (mul1, 1mad). So the hash itself, four unsigned bytes, is one operand of an integer matrix
// product whose other operand repeats the input four times: cutting its state out and a multiplication are all that a weight costs; there is no byte sum, no
// conversion and no multiply-add. The inputs are fixed point, LIMBS signed bytes each that take a column of the product apiece: three (24 bits,
// relative to the largest |x|) are as exact as float32, one is int8 activations. Sums are exact integers to the very end, so that the result does not
// depend on how the work is shared out, nor on the card.
//
// A thread block has whole rows of tiles, each block as many, and a share of what is then left, in pairs of rows. Its warps share that in units of four
// neighbouring tiles. Lane l of a warp decodes rows 2r and 2r+1, r = l/4, of tile l%4: 32 consecutive steps of one trellis block, which are K
// whole words and one more. Of the pairs that are left a warp takes four at a time, where inputs leave half of a product's columns free: the
// upper lanes then work on the second half of the same four pairs' inputs. So no two blocks have to meet. (They did, in device memory: zeros before
// a launch and a slice after it are launches too. Clusters of blocks would meet in shared memory. But MLX replays graphs with other kernels in them, and a
// kernel that takes the place of one with clusters loses the blocks that do not fill a cluster: measured, mlx 0.32.4.)
#include "cuda/tile_decode.cuh"

constexpr int TQ_WARPS = 16, TQ_THREADS = 32 * TQ_WARPS;
constexpr int TQ_AHEAD = 4;      // units that are fetched ahead of those in work
constexpr int TQ_IN_HAND = 192;  // bytes of inputs that a thread has in registers at most
constexpr int TQ_FLUSH = 256;    // units whose sums fit 32 bits: 256 * 64 inputs * 4 bytes of 255 * 128 < 2^31

// How a matrix is shared out; BLOCKS thread blocks, SLICE units of x in shared memory at once.
template <int ROWS, int COLS, int SQUARES, int SLICE, int BLOCKS, int COLUMNS> struct TqShare {
  static constexpr int row_tiles = (ROWS + 15) / 16, units = (SQUARES + 3) / 4;
  static constexpr int groups = (COLUMNS + 7) / 8;                      // products of eight columns
  static constexpr int split = 2 * COLUMNS <= 8 * groups ? 2 : 1;       // parts of the inputs that a warp works on at once in pairs of rows that were left
  static constexpr int together = 8 / split;                            // such pairs at once
  static constexpr int whole = row_tiles / BLOCKS;                      // rows of tiles of each block
  static constexpr int left = 8 * (row_tiles % BLOCKS);                 // pairs of rows beyond those, of all blocks
  static constexpr int most = (left + BLOCKS - 1) / BLOCKS;             // of one block
  static constexpr int rows = 16 * whole + 2 * most;                    // of one block, at most
  static constexpr bool one_slice = SLICE >= units;
  // Whether every unit that is fetched lies inside the matrix.
  static constexpr bool exact = SQUARES % 4 == 0 && (one_slice ? units : SLICE) % split == 0 && (one_slice || units % SLICE % split == 0);
  static __device__ __forceinline__ int left_before(int block) { return (int)((unsigned long long)left * block / BLOCKS); }
};

template <int K, int L, int CODE, int MATRICES, int M, int LIMBS, int ROWS, int COLS, int SQUARES, int SLICE, int BLOCKS, class T, class S>
static __device__ __forceinline__ void tq_tile(const uint32_t *words0, const S *scales0, const uint32_t *words1, const S *scales1, const T *x, T *y) {
  constexpr int COLUMNS = LIMBS * M, BLOCK = 8 * K;
  using Share = TqShare<ROWS, COLS, SQUARES, SLICE, BLOCKS, COLUMNS>;
  constexpr int UNITS = Share::units, GROUPS = Share::groups, SPLIT = Share::split, TOGETHER = Share::together;
  // Times four inputs: those of a row of x that a thread takes in a slice, and those of each row that it has in registers at once.
  constexpr int FOURS = ((Share::one_slice ? UNITS : SLICE) * 16 + TQ_THREADS - 1) / TQ_THREADS, MOST_FOURS = TQ_IN_HAND / (4 * sizeof(T) * M), IN_HAND = FOURS < MOST_FOURS ? FOURS : MOST_FOURS;
  constexpr uint32_t WORDS = (uint32_t)Share::row_tiles * SQUARES * BLOCK;
  extern __shared__ __align__(16) unsigned char tq_shared[];
  __shared__ uint32_t largest[M];
  __shared__ TqSum total[M];
  TqSum *acc = reinterpret_cast<TqSum *>(tq_shared);  // [row of the block][matrix][column]
  constexpr int SUMS = Share::rows * MATRICES * COLUMNS;
  uint4 *xs = reinterpret_cast<uint4 *>(tq_shared + ((SUMS * sizeof(TqSum) + 15) & ~(size_t)15));  // [unit][quarter of a tile][column][tile of the unit]: 4 inputs, each byte 4 times
  constexpr int UNIT_CELLS = 16 * COLUMNS;
  // The compiler is to know that a warp is of one mind about its number.
  const int tid = threadIdx.x, lane = tid & 31, warp = __shfl_sync(~0u, tid >> 5, 0), r = lane >> 2, c = lane & 3;
  const int block = blockIdx.x, tile0 = block * Share::whole, pair0 = Share::left_before(block), pairs = Share::left_before(block + 1) - pair0;

  // Inputs of all rows at once: one wait. Neighbouring threads take neighbouring tiles, whose cells in shared memory are neighbours.
  using InHand = TqFour<T>[M][IN_HAND];
  InHand in;
  auto load = [&](InHand &in, int slice0, int g0) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int i = 0; i < IN_HAND; i++) {
        const int g = g0 + i * TQ_THREADS;
        in[m][i].load(x + (size_t)m * COLS, ((slice0 + (g >> 4)) * 4 + (g & 3)) * 16 + (g >> 2 & 3) * 4, COLS);
      }
  };
  load(in, 0, tid);

  // The work of a slice, [matrix][whole rows of tiles, then pairs that were left][unit], and the part of it that a position begins.
  int here, half, bulk, each;
  struct Part {
    int matrix, row, unit, length;  // row: of tiles, or of groups of pairs
    bool is_left;
  };
  auto part_at = [&](int position) {
    Part part;
    part.matrix = MATRICES == 2 && position >= each;
    const int rest = position - part.matrix * each;
    part.is_left = rest >= bulk;
    // Apart, so that what is divided by is known to the compiler.
    if (part.is_left)
      part.row = (rest - bulk) / half, part.unit = rest - bulk - part.row * half, part.length = half - part.unit;
    else
      part.row = rest / here, part.unit = rest - part.row * here, part.length = here - part.unit;
    return part;
  };
  auto pair_of = [&](const Part &part) { return part.row * TOGETHER + (TOGETHER == 8 ? r : r % TOGETHER); };

  // What is fetched next, in batches. All of a batch at once: one wait for what was asked for a batch ago. Past the end of the share the last words again.
  TqLane<K> ahead[TQ_AHEAD], now[TQ_AHEAD];
  int fetch_at, fetch_left, last;
  const uint32_t *from = words0;
  uint32_t offset = 0;  // in words
  int next = K;         // from a lane's first word to the one after its last: a trellis block is a ring
  auto enter_fetch = [&](int slice0) {
    const Part part = part_at(fetch_at);
    from = part.matrix ? words1 : words0;
    const int pair = min(pair_of(part), pairs - 1) + pair0, ring = part.is_left ? pair & 7 : r;
    const int row = part.is_left ? BLOCKS * Share::whole + (pair >> 3) : tile0 + part.row, unit = part.unit + (part.is_left && SPLIT == 2 ? r / TOGETHER * half : 0);
    offset = ((uint32_t)row * SQUARES + (slice0 + unit) * 4 + c) * BLOCK + (7 - ring) * K;
    next = ring ? K : -7 * K;
    // Whole rows of tiles follow each other, where units divide them.
    fetch_left = Share::one_slice && SQUARES % 4 == 0 && !part.is_left ? bulk - part.row * here - part.unit : part.length;
    fetch_left = min(fetch_left, last - fetch_at), fetch_at += fetch_left;
  };
  auto fetch = [&](int slice0) {
    // At the end of a part a unit may lie partly outside; of the second half of an odd number, one more lies wholly there.
    if (fetch_left >= TQ_AHEAD + (Share::exact ? 0 : SPLIT)) {
      const uint32_t *p = from + offset, *q = p + next;
#pragma unroll
      for (int i = 0; i < TQ_AHEAD; i++) tq_load<K>(ahead[i], p + i * 4 * BLOCK, q + i * 4 * BLOCK);
      offset += TQ_AHEAD * 4 * BLOCK, fetch_left -= TQ_AHEAD;
      return;
    }
#pragma unroll
    for (int i = 0; i < TQ_AHEAD; i++) {
      if (fetch_left == 0 && fetch_at < last) enter_fetch(slice0);
      const uint32_t at = min(offset, WORDS - K);  // no tile is read behind the last one; what it holds meets inputs that are 0
      tq_load<K>(ahead[i], from + at, from + min(at + next, WORDS - 1));
      if (fetch_left) offset += 4 * BLOCK, fetch_left--;
    }
  };
  int at;
  auto begin = [&](int slice0) {
    here = Share::one_slice ? UNITS : min(SLICE, UNITS - slice0), half = (here + SPLIT - 1) / SPLIT;
    bulk = Share::whole * here, each = bulk + (pairs + TOGETHER - 1) / TOGETHER * half;
    const int all = MATRICES * each;
    at = fetch_at = all * warp / TQ_WARPS, last = all * (warp + 1) / TQ_WARPS, fetch_left = 0;
    if (at < last) enter_fetch(slice0);
  };
  begin(0);

  for (int i = tid; i < SUMS; i += TQ_THREADS) acc[i] = {0, 0};
  if (tid < M) largest[tid] = 0, total[tid] = {0, 0};
  __syncthreads();
  // Largest |x| of each row, by its bits: what is not finite comes out on top. The first inputs stay in hand.
  uint32_t most[M] = {};
  auto compare = [&](const InHand &in) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int i = 0; i < IN_HAND; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) most[m] = max(most[m], __float_as_uint(in[m][i][e]) & 0x7FFFFFFFu);
  };
  compare(in);
  for (int g0 = tid + IN_HAND * TQ_THREADS; g0 < UNITS * 16; g0 += IN_HAND * TQ_THREADS) {
    InHand more;
    load(more, 0, g0);
    compare(more);
  }
#pragma unroll
  for (int m = 0; m < M; m++) {
    most[m] = __reduce_max_sync(~0u, most[m]);
    if (lane == 0) atomicMax(&largest[m], most[m]);
  }
  S scales[MATRICES];  // of the first row that this thread finishes
  auto row_of = [&](int row) { return row < 16 * Share::whole ? tile0 * 16 + row : row - 16 * Share::whole < 2 * pairs ? BLOCKS * Share::whole * 16 + 2 * pair0 + row - 16 * Share::whole : ROWS; };
  auto load_scales = [&](int e) {
    const int row = row_of(e % Share::rows);
#pragma unroll
    for (int q = 0; q < MATRICES; q++) scales[q] = (q ? scales1 : scales0)[row < ROWS ? row : 0];
  };

  // Not before x is here: what waits for x would wait for these too.
  fetch(0);
  load_scales(tid);
  __syncthreads();

  int sum[GROUPS][2][4] = {};
  for (int slice0 = 0; slice0 < UNITS; slice0 += SLICE) {
    if (slice0 != 0) {
      begin(slice0);
      load(in, slice0, tid);
      fetch(slice0);
      __syncthreads();
    }
    // The slice of x as limbs, and the sum of all fixed-point inputs, which the code's mean multiplies.
    int part[M] = {};  // at most 256 inputs a thread, see supports()
    for (int g0 = tid; g0 < here * 16; g0 += IN_HAND * TQ_THREADS) {
      if (g0 != tid) load(in, slice0, g0);
#pragma unroll
      for (int m = 0; m < M; m++) {
        const float to_fixed = tq_to_fixed<LIMBS>(largest[m]);
#pragma unroll
        for (int i = 0; i < IN_HAND; i++) {
          const int g = g0 + i * TQ_THREADS, unit = g >> 4, quarter = g >> 2 & 3, column = g & 3;
          uint4 *cell = xs + unit * UNIT_CELLS + (quarter * COLUMNS + m * LIMBS) * 4 + column;
          uint32_t limbs[4];  // bytes 0 .. LIMBS-1
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const int q = __float2int_rn(in[m][i][e] * to_fixed);
            if (unit < here) part[m] += q;
            limbs[e] = tq_limbs<LIMBS>(q);
          }
#pragma unroll
          for (int l = 0; l < LIMBS; l++) {
            // Cells of neighbouring quarters lie in the same banks where there is an even number of columns: half of the threads begin with another limb.
            const int limb = COLUMNS % 2 == 0 && tid & 4 ? (l + 1) % LIMBS : l;
            const uint32_t of = 0x1111 * limb;
            if (unit < here) cell[limb * 4] = make_uint4(__byte_perm(limbs[0], 0, of), __byte_perm(limbs[1], 0, of), __byte_perm(limbs[2], 0, of), __byte_perm(limbs[3], 0, of));
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
      const int low = __reduce_add_sync(~0u, part[m] & 0xFFFF), high = __reduce_add_sync(~0u, part[m] >> 16);
      if (lane == 0) atomicAdd(&total[m].low, low), atomicAdd(&total[m].high, high);
    }
    if (SPLIT == 2 && here % 2)  // the unit that the second half of the inputs lacks
      for (int i = tid; i < UNIT_CELLS; i += TQ_THREADS) xs[here * UNIT_CELLS + i] = make_uint4(0, 0, 0, 0);
    __syncthreads();

    // The part in work: its inputs, and the place of its sums.
    const uint4 *cell = xs;
    int left = 0, remaining = 0, row = 0, first_column = 0;
    bool is_mine = false;
    auto enter = [&]() {
      if (remaining == 0 && at < last) {
        const Part part = part_at(at);
        remaining = min(part.length, last - at), at += remaining;
        if (part.is_left && SPLIT == 2) {
          const int of = r >= COLUMNS;  // this column of the product belongs to the second half of the inputs
          cell = xs + (part.unit + of * half) * UNIT_CELLS + min(r - of * COLUMNS, COLUMNS - 1) * 4 + c;
          first_column = r / TOGETHER * COLUMNS;
        } else
          cell = xs + part.unit * UNIT_CELLS + min(r, COLUMNS - 1) * 4 + c, first_column = 0;
        const int pair = pair_of(part);
        is_mine = !part.is_left || pair < pairs;
        row = (part.is_left ? 16 * Share::whole + 2 * pair : part.row * 16 + 2 * r) * MATRICES + part.matrix;
      }
      left = min(remaining, TQ_FLUSH), remaining -= left;
    };
    enter();
    const auto multiply = [&](const TqLane<K> &words, const uint4 *cell) {
#pragma unroll
      for (int i4 = 0; i4 < 4; i4++) {
        uint4 in[GROUPS];
#pragma unroll
        for (int g = 0; g < GROUPS; g++) in[g] = cell[(i4 * COLUMNS + (g ? min(8 * g + r, COLUMNS - 1) - r : 0)) * 4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int i = 4 * i4 + 2 * h;  // inputs i, i+1 of the lane's first row (steps 0..15 of its 32) and of its second
          const uint32_t a0 = tq_hash<K, L, CODE>(words, i), a1 = tq_hash<K, L, CODE>(words, 16 + i);
          const uint32_t a2 = tq_hash<K, L, CODE>(words, i + 1), a3 = tq_hash<K, L, CODE>(words, 17 + i);
#pragma unroll
          for (int g = 0; g < GROUPS; g++) tq_imma(sum[g][h], a0, a1, a2, a3, h ? in[g].z : in[g].x, h ? in[g].w : in[g].y);
        }
      }
    };
    while (left > 0) {
#pragma unroll
      for (int slot = 0; slot < TQ_AHEAD; slot++) now[slot] = ahead[slot];
      fetch(slice0);
      if (left > TQ_AHEAD) {  // no part ends here
#pragma unroll
        for (int slot = 0; slot < TQ_AHEAD; slot++) multiply(now[slot], cell + slot * UNIT_CELLS);
        cell += TQ_AHEAD * UNIT_CELLS, left -= TQ_AHEAD;
        continue;
      }
#pragma unroll
      for (int slot = 0; slot < TQ_AHEAD; slot++) {
        multiply(now[slot], cell);
        cell += UNIT_CELLS;
        if (--left) continue;
        // The end of a part, of this warp's share, or of what 32 bits hold.
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const int column = 8 * g + 2 * c + (j & 1) - first_column;
            if (is_mine && column >= 0 && column < COLUMNS) acc[(row + (j >> 1) * MATRICES) * COLUMNS + column].add(sum[g][0][j] + sum[g][1][j]);
            sum[g][0][j] = sum[g][1][j] = 0;
          }
        enter();
        if (left == 0) break;
      }
    }
  }

  __syncthreads();
  for (int e = tid; e < Share::rows * M; e += TQ_THREADS) {
    const int m = e / Share::rows, at = e - m * Share::rows, row = row_of(at);
    if (e != tid) load_scales(e);
    if (row >= ROWS) continue;
    float value[MATRICES];
#pragma unroll
    for (int q = 0; q < MATRICES; q++) {
      long long z = -TQ_BYTE_SUM_MEAN * total[m].value();
#pragma unroll
      for (int l = 0; l < LIMBS; l++) z += acc[(at * MATRICES + q) * COLUMNS + m * LIMBS + l].value() * (1ll << (8 * l));
      const float unit = CODE == TQ_CODE_MUL1 ? TQ_MUL1_INVERSE_UNIT : TQ_1MAD_INVERSE_UNIT;
      value[q] = (float)z * tq_from_fixed<LIMBS>(largest[m]) * ((float)scales[q] * unit);
    }
    y[(size_t)m * ROWS + row] = tq_cast<T>(MATRICES == 2 ? value[0] / (1.f + expf(-value[0])) * value[1] : value[0]);
  }
}

// MLX writes `__global__ void name(` in front of a body: this is where its attributes can be said. Without bounds the compiler takes more
// registers than 512 threads have.
#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__(TQ_THREADS, 1)
