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

template <int B> struct TqJob {
  int block[B], seam[B], open[B];  // blocks that are searched together, -1 for none
  int waiting[2 * B], at[2 * B];   // blocks whose path was open, and their seams
};

template <class S> static __device__ __forceinline__ void tq_viterbi(const int16_t *x, const int16_t *levels, const uint32_t *dims, uint16_t *states, uint32_t *history) {
  constexpr int B = S::BLOCKS, T = TQ_T, J = S::J, CHUNK = S::COST_BYTES / S::ROW;
  constexpr int COPIES = S::COST_BYTES / 16 / S::THREADS, BATCH = COPIES < 8 ? COPIES : 8;
  extern __shared__ __align__(16) unsigned char tq_shared[];
  __shared__ TqJob<B> job;
  auto *costs = reinterpret_cast<typename S::Word *>(tq_shared);
  auto *inputs = reinterpret_cast<typename S::Word *>(tq_shared + S::COST_BYTES);                        // [T]
  auto *found = reinterpret_cast<uint16_t *>(tq_shared + S::COST_BYTES + T * sizeof(typename S::Word));  // [B][T]
  const int t = threadIdx.x, own = t >> 5, lane = t & 31;
  unsigned char *choices = reinterpret_cast<unsigned char *>(history) + (size_t)blockIdx.x * (T * S::ROW);
  S search(levels, reinterpret_cast<volatile uint32_t *>(tq_shared) + t);
  // What the steps do not need has no register during them.
  const volatile uint32_t &blocks = dims[0], &warmup = dims[1], &resume = dims[2];
  volatile int next = blockIdx.x * B, waiting = 0, walked = 0;

  // The way back from suffix `walked` after step `top` - 1, a warp for a block. Choices come back some steps at a time, where the costs were.
  const auto walk = [&](int top) {
    const unsigned char *chunk = reinterpret_cast<const unsigned char *>(costs);
    int j = walked;
    for (; top > 0; top -= CHUNK) {
      __syncthreads();
      const uint4 *from = reinterpret_cast<const uint4 *>(choices + (top - CHUNK) * S::ROW) + t;
      for (int i = 0; i < COPIES; i += BATCH) {  // a batch is on its way at once: the loads before the stores
        uint4 batch[BATCH];
#pragma unroll
        for (int l = 0; l < BATCH; l++) batch[l] = __ldcg(from + (i + l) * S::THREADS);
#pragma unroll
        for (int l = 0; l < BATCH; l++) reinterpret_cast<uint4 *>(costs)[t + (i + l) * S::THREADS] = batch[l];
      }
      __syncthreads();
      if (own < B)
#pragma unroll 4
        for (int s = CHUNK - 1; s >= 0; s--) {
          const int state = ((chunk[s * S::ROW + S::choice(j, own)] >> (4 * (own & 1))) & (S::D - 1)) * J | j;
          if (lane == 0) found[own * T + top - CHUNK + s] = (uint16_t)state;
          j = state >> S::BITS;
        }
    }
    walked = j;
    __syncthreads();
  };

  for (;;) {
    const bool fresh = next < (int)blocks && waiting < B;
    if (!fresh && waiting == 0) break;
    const int taken = fresh ? 0 : waiting < B ? (int)waiting : B;
    waiting = waiting - taken;
    if (t < B) {
      job.block[t] = fresh ? (next + t < (int)blocks ? next + t : -1) : t < taken ? job.waiting[waiting + t] : -1;
      job.seam[t] = t < taken ? job.at[waiting + t] : 0;
    }
    if (fresh) next = next + gridDim.x * B;
    __syncthreads();
    for (int i = t; i < B * T; i += S::THREADS) {
      const int block = job.block[i / T];
      reinterpret_cast<uint32_t *>(&inputs[i % T])[i / T] = block >= 0 ? (uint32_t)(S::INPUT * (int)x[(size_t)block * T + i % T]) : 0u;
    }
    // Step i takes input i mod T; choices are kept from T on.
    int first = fresh ? T - (int)warmup : T, end = fresh ? T + (int)warmup : 2 * T;
    bool begin = true, pinned = !fresh;
    for (;;) {
      if (begin) {
        search.fill(costs, pinned ? TQ_UNREACHED : 0u);
        __syncthreads();
        if (pinned && own < B && lane == 0) *search.cost(costs, job.seam[own], own) -= TQ_UNREACHED;
        __syncthreads();
      }
      for (int i = first; i < end; i++) {
        search.step(costs, inputs[i & (T - 1)], i, i >= T, choices + (i & (T - 1)) * S::ROW);
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
        walked = j;
      }
      __syncthreads();
      pinned = begin = !resume;
      first = resume ? end : T, end = 2 * T;
      if (pinned) {
        walk(warmup);
        if (own < B && lane == 0) job.seam[own] = walked;
        __syncthreads();
      }
    }
    if (!pinned) {
      walk(warmup);
      if (own < B && lane == 0) job.seam[own] = walked;
    } else if (own < B) {
      walked = job.seam[own];
    }
    walk(T);
    if (own < B && lane == 0) job.open[own] = !pinned && job.block[own] >= 0 && walked != job.seam[own];
    __syncthreads();
    for (int i = t; i < B * T / 2; i += S::THREADS) {
      const int b = i / (T / 2), block = job.block[b];
      if (block >= 0 && !job.open[b]) reinterpret_cast<uint32_t *>(states)[(size_t)block * (T / 2) + i % (T / 2)] = reinterpret_cast<const uint32_t *>(found)[i];
    }
    for (int b = 0; b < B; b++) {
      if (!job.open[b]) continue;
      if (t == 0) job.waiting[waiting] = job.block[b], job.at[waiting] = job.seam[b];
      waiting = waiting + 1;
    }
    __syncthreads();
  }
}
