// The search that all windows share: which blocks are searched together, in which passes, and the ways back. A policy S (viterbi_rows.cuh, viterbi_in_place.cuh) makes
// the step: it has the levels in registers, knows where the cost of a suffix lies, and writes the choices of a step.
//
// The first pass runs over the seam with free ends, to say which suffix stands there; a second, pinned pass starts and ends at it: Algorithm 4, 2 T steps. With
// `resume` the second is half as long. The pinned pass wants, for every suffix, the best path that began at the seam's; the first has, after its second half, best
// paths that began anywhere, which cost no more. So it goes on from there as if the seam did not matter, T/2 steps more; and if the path that ends at the seam's
// suffix has also come through it at the seam, it is the best of those that did, and the one that the pinned pass would find: along it both have the same costs
// but for a constant, nowhere has the pinned one lower ones, so the lowest of its best choices are the same. The few blocks whose path is open wait until there
// are enough of them for a pinned pass. That pass needs no second look: it begins where nothing else is reached.
#include "cuda/device.cuh"

constexpr int TQ_T = 256, TQ_MOST = 560;
constexpr uint32_t TQ_UNREACHED = 1u << 28;  // more than two paths of a few steps can differ by

// A word of costs for each of the blocks that are searched together.
template <int BLOCKS> struct TqCell;
template <> struct TqCell<4> { using Word = uint4; };
template <> struct TqCell<2> { using Word = uint2; };
static __device__ __forceinline__ void tq_unpack(uint4 cell, uint32_t (&word)[4]) { word[0] = cell.x, word[1] = cell.y, word[2] = cell.z, word[3] = cell.w; }
static __device__ __forceinline__ void tq_unpack(uint2 cell, uint32_t (&word)[2]) { word[0] = cell.x, word[1] = cell.y; }
static __device__ __forceinline__ uint4 tq_cell(const uint32_t (&word)[4]) { return make_uint4(word[0], word[1], word[2], word[3]); }
static __device__ __forceinline__ uint2 tq_cell(const uint32_t (&word)[2]) { return make_uint2(word[0], word[1]); }

// Low nibbles of the words of four suffixes; two blocks in a byte, four suffixes in a word.
template <int B> static __device__ __forceinline__ void tq_pack_choices(const uint32_t (&best)[4][B], uint32_t *packed) {
#pragma unroll
  for (int b = 0; b < B; b += 2) {
    uint32_t bytes[2];
#pragma unroll
    for (int i = 0; i < 2; i++) bytes[i] = __byte_perm(__byte_perm(best[0][b + i], best[1][b + i], 0x0040), __byte_perm(best[2][b + i], best[3][b + i], 0x0040), 0x5410);
    packed[b / 2] = (bytes[0] & 0x0F0F0F0Fu) | ((bytes[1] << 4) & 0xF0F0F0F0u);
  }
}

// Words of choices to device memory, 16 bytes at a time where there are as many.
template <int WORDS> static __device__ __forceinline__ void tq_store_choices(unsigned char *to, const uint32_t (&packed)[WORDS]) {
  if constexpr (WORDS >= 4) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) __stcg(reinterpret_cast<uint4 *>(to) + i / 4, make_uint4(packed[i], packed[i + 1], packed[i + 2], packed[i + 3]));
  } else if constexpr (WORDS == 2) {
    __stcg(reinterpret_cast<uint2 *>(to), make_uint2(packed[0], packed[1]));
  } else {
    __stcg(reinterpret_cast<uint32_t *>(to), packed[0]);
  }
}

// Two jobs of B blocks: one is searched, the other walked back.
template <int B> struct TqJobs {
  int block[2][B], seam[2][B];           // -1 for none; the suffix that stands at the seam
  int at[2][B];                          // where the way back has come to
  int left[B], asked[B];                 // how many steps of it are left, T of them after the seam; whether the choice of the next is on its way
  int pinned[2];                            // whether it can only be closed
  int open[B], waiting[2 * B], pin[2 * B];  // blocks whose path was open, and their seams
  uint4 arrived[B];
};

template <class S> static __device__ __forceinline__ void tq_viterbi(const int16_t *x, const int16_t *levels, const uint32_t *dims, uint16_t *states, uint32_t *history) {
  constexpr int B = S::BLOCKS, T = TQ_T, J = S::J, CHUNK = S::COST_BYTES / S::ROW, JOBS = S::ASIDE ? 2 : 1;
  constexpr int COPIES = S::COST_BYTES / 16 / S::THREADS, BATCH = COPIES < 8 ? COPIES : 8;
  extern __shared__ __align__(16) unsigned char tq_shared[];
  __shared__ TqJobs<B> jobs;
  auto *costs = reinterpret_cast<typename S::Word *>(tq_shared);
  auto *inputs = reinterpret_cast<typename S::Word *>(tq_shared + S::COST_BYTES);                        // [T]
  auto *found = reinterpret_cast<uint16_t *>(tq_shared + S::COST_BYTES + T * sizeof(typename S::Word));  // [B][T]
  const int t = threadIdx.x, own = t >> 5, lane = t & 31;
  unsigned char *choices = reinterpret_cast<unsigned char *>(history) + (size_t)blockIdx.x * (JOBS * T * S::ROW);
  S search(levels, reinterpret_cast<volatile uint32_t *>(tq_shared) + t);
  // What the steps do not need has no register during them.
  const volatile uint32_t &blocks = dims[0], &warmup = dims[1], &resume = dims[2];
  volatile int next = blockIdx.x * B, waiting = 0, walking = 0;  // whether the job that is not `half` is walked back
  if (t < B) jobs.left[t] = 0;

  // The state before suffix j, given the choices of its step that lie from `row` on.
  const auto state_before = [](const unsigned char *row, int offset, int j, int b) { return ((row[offset] >> (4 * (b & 1))) & (S::D - 1)) * J | j; };

  // The way back of a job from step `top` - 1, a warp for a block. Choices come back some steps at a time, where the costs were.
  const auto walk = [&](int job, int top, bool keep) {
    const unsigned char *chunk = reinterpret_cast<const unsigned char *>(costs);
    int j = own < B ? jobs.at[job][own] : 0;
    while (top > 0) {
      const int base = top > CHUNK ? top - CHUNK : 0;
      __syncthreads();
      const uint4 *from = reinterpret_cast<const uint4 *>(choices + (job * T + base) * S::ROW) + t;
      for (int i = 0; i < COPIES; i += BATCH) {  // a batch is on its way at once: the loads before the stores
        uint4 batch[BATCH];
#pragma unroll
        for (int l = 0; l < BATCH; l++) batch[l] = __ldcg(from + (i + l) * S::THREADS);
#pragma unroll
        for (int l = 0; l < BATCH; l++) reinterpret_cast<uint4 *>(costs)[t + (i + l) * S::THREADS] = batch[l];
      }
      __syncthreads();
      if (own < B)
#pragma unroll(S::UNROLLED)
        for (int s = top - base - 1; s >= 0; s--) {
          const int state = state_before(chunk + s * S::ROW, S::choice(j, own), j, own);
          if (keep && lane == 0) found[own * T + base + s] = (uint16_t)state;
          j = state >> S::BITS;
        }
      top = base;
    }
    if (own < B && lane == 0) jobs.at[job][own] = j;
    __syncthreads();
  };

  // One step of the way back during a step of the search: what the last one asked for has arrived, what the next one needs is asked for.
  const auto walk_aside = [&](int job) {
    int left = jobs.left[t], j = jobs.at[job][t];
    if (left == 0) return;
    if (jobs.asked[t]) {
      tq_arrived();
      const int state = state_before(reinterpret_cast<const unsigned char *>(&jobs.arrived[t]), S::choice(j, t) & 15, j, t);
      left--, j = state >> S::BITS;
      if (left < T) found[t * T + left] = (uint16_t)state;
      if (left == T) jobs.seam[job][t] = j;
      jobs.left[t] = left, jobs.at[job][t] = j;
    }
    jobs.asked[t] = left > 0;
    if (left > 0) tq_ask(&jobs.arrived[t], choices + (((job * T + (left - 1) % T) * S::ROW + S::choice(j, t)) & ~15));
  };

  // What is left of a job's way back; then its paths go out, but for those that are open.
  const auto finish = [&](int job) {
    if (S::ASIDE && t < B) tq_arrived();
    const int left = jobs.left[0];
    if (left > T) {
      walk(job, left - T, false);
      if (own < B && lane == 0) jobs.seam[job][own] = jobs.at[job][own];
    }
    walk(job, left < T ? left : T, true);
    if (t < B) jobs.left[t] = 0, jobs.open[t] = !jobs.pinned[job] && jobs.block[job][t] >= 0 && jobs.at[job][t] != jobs.seam[job][t];
    __syncthreads();
    for (int i = t; i < B * T / 2; i += S::THREADS) {
      const int b = i / (T / 2), block = jobs.block[job][b];
      if (block >= 0 && !jobs.open[b]) reinterpret_cast<uint32_t *>(states)[(size_t)block * (T / 2) + i % (T / 2)] = reinterpret_cast<const uint32_t *>(found)[i];
    }
    for (int b = 0; b < B; b++) {
      if (!jobs.open[b]) continue;
      if (t == 0) jobs.waiting[waiting] = jobs.block[job][b], jobs.pin[waiting] = jobs.seam[job][b];
      waiting = waiting + 1;
    }
    __syncthreads();
  };

  volatile int turn = 0;  // of a job to be searched
  for (;;) {
    const int half = S::ASIDE ? turn : 0;
    const bool fresh = next < (int)blocks && waiting < B;
    if (!fresh && waiting == 0) {
      if (!S::ASIDE || !walking) break;
      finish(half ^ 1);
      walking = 0;
      continue;
    }
    const int taken = fresh ? 0 : waiting < B ? (int)waiting : B;
    waiting = waiting - taken;
    if (t < B) {
      jobs.block[half][t] = fresh ? (next + t < (int)blocks ? next + t : -1) : t < taken ? jobs.waiting[waiting + t] : -1;
      jobs.seam[half][t] = t < taken ? jobs.pin[waiting + t] : 0;
    }
    if (fresh) next = next + gridDim.x * B;
    __syncthreads();
    for (int i = t; i < B * T; i += S::THREADS) {
      const int block = jobs.block[half][i / T];
      reinterpret_cast<uint32_t *>(&inputs[i % T])[i / T] = block >= 0 ? (uint32_t)(S::INPUT * (int)x[(size_t)block * T + i % T]) : 0u;
    }
    // Step i takes input i mod T; choices are kept from T on.
    int first = fresh ? T - (int)warmup : T, end = fresh ? T + (int)warmup : 2 * T;
    bool begin = true, pinned = !fresh;
    for (;;) {
      if (begin) {
        search.fill(costs, pinned ? TQ_UNREACHED : 0u);
        __syncthreads();
        if (pinned && own < B && lane == 0) *search.cost(costs, jobs.seam[half][own], own) -= TQ_UNREACHED;
        __syncthreads();
      }
      unsigned char *rows = choices + half * T * S::ROW;
      for (int i = first; i < end; i++) {
        if (S::ASIDE && t < B) walk_aside(half ^ 1);
        search.step(costs, inputs[i & (T - 1)], i, i >= T, rows + (i & (T - 1)) * S::ROW);
        __syncthreads();
      }
      if (end == 2 * T) break;
      if (own < B) {  // the lowest suffix of the lowest cost of the block
        uint32_t least = ~0u;
        int j = 0;
        for (int i = lane; i < J; i += 32) {
          const uint32_t cost = *search.cost(costs, i, own);
          if (cost < least) least = cost, j = i;
        }
        for (int step = 16; step; step >>= 1) {
          const uint32_t cost = __shfl_xor_sync(~0u, least, step);
          const int other = __shfl_xor_sync(~0u, j, step);
          if (cost < least || (cost == least && other < j)) least = cost, j = other;
        }
        if (lane == 0) jobs.at[half][own] = j;
      }
      __syncthreads();
      pinned = begin = !resume;
      first = resume ? end : T, end = 2 * T;
      if (pinned) {
        walk(half, warmup, false);
        if (own < B && lane == 0) jobs.seam[half][own] = jobs.at[half][own];
        __syncthreads();
      }
    }
    if (S::ASIDE && walking) finish(half ^ 1);
    if (t < B) {
      jobs.left[t] = pinned ? T : T + (int)warmup, jobs.asked[t] = 0;
      if (pinned) jobs.at[half][t] = jobs.seam[half][t];
      if (t == 0) jobs.pinned[half] = pinned;
    }
    __syncthreads();
    if (S::ASIDE) {
      walking = 1, turn = turn ^ 1;
    } else {
      finish(half);
    }
  }
}
