// Packed KV records (docs/formats/kv.md): keys and values to records, records to keys and rotated values, attention of one token over them.
//
// Every operation of the encoder is one IEEE float32 operation in the order of tqtool/kv/codec.py, so its bytes are those of numpy. Attention goes over
// chunks of kChunk tokens, each computed by one thread, and their sums are put together in order: results never depend on the number of threads. Values are
// summed rotated; each query's sum is rotated back once.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include "common/kv_decode.h"
#include "cpu/module.h"
#include "cpu/parallel.h"

namespace nb = nanobind;

namespace {

constexpr size_t kGroup = TQ_KV_GROUP, kChunk = 128, kMostDim = 512, kGrain = 16;

struct Layout {
  size_t d;
  int k_bits, v_bits;
  size_t affine, values, scales, words;
};

inline uint32_t as_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// The value of a float16: the exponent is moved by a multiplication that also makes subnormals normal; infinities and NaN are set apart.
inline float from_half(uint32_t half) {
  const float size = as_float((half & 0x7FFFu) << 13) * 0x1p112f;
  const uint32_t bits = (half & 0x7C00u) == 0x7C00u ? 0x7F800000u | (half & 0x3FFu) << 13 : as_bits(size);
  return as_float(bits | (half & 0x8000u) << 16);
}

// The float16 nearest to x, ties to even: |x| up to 65504, which is all that encoders store; beyond that infinity.
inline uint32_t to_half(float x) {
  const uint32_t bits = as_bits(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7FFFFFFFu;
  if (size >= 0x7F800000u) return sign | 0x7C00u | (size > 0x7F800000u ? 0x200u : 0u);
  if (size < 0x38800000u) return sign | as_bits(as_float(size) + 0.5f) - 0x3F000000u;  // subnormal: 2^-24 is the last bit of a half's sum with 0.5
  const uint32_t rounded = size + 0xFFFu + (size >> 13 & 1u);
  return rounded >= 0x47800000u ? sign | 0x7C00u : sign | (rounded - 0x38000000u) >> 13;
}

#if defined(__x86_64__) && defined(__clang__)
#define TQ_TARGET_PUSH_AVX2 _Pragma("clang attribute push(__attribute__((target(\"avx2\"))), apply_to = function)")
#define TQ_TARGET_PUSH_AVX512 _Pragma("clang attribute push(__attribute__((target(\"avx512f,avx512bw,avx512vl\"))), apply_to = function)")
#define TQ_TARGET_POP _Pragma("clang attribute pop")
#elif defined(__x86_64__)
#define TQ_TARGET_PUSH_AVX2 _Pragma("GCC push_options") _Pragma("GCC target(\"avx2\")")
#define TQ_TARGET_PUSH_AVX512 _Pragma("GCC push_options") _Pragma("GCC target(\"avx512f,avx512bw,avx512vl\")")
#define TQ_TARGET_POP _Pragma("GCC pop_options")
#endif

namespace baseline {
#include "cpu/kv.inl"
}
#ifdef __x86_64__
TQ_TARGET_PUSH_AVX2
namespace avx2 {
#include "cpu/kv.inl"
}
TQ_TARGET_POP
TQ_TARGET_PUSH_AVX512
namespace avx512 {
#include "cpu/kv.inl"
}
TQ_TARGET_POP
#endif

struct Kernels {
  decltype(&baseline::attend_chunk) attend_chunk;
  decltype(&baseline::encode) encode;
  decltype(&baseline::decode) decode;
  decltype(&baseline::unrotate) unrotate;
};

void require(bool holds, const char *message) {
  if (!holds) throw std::invalid_argument(message);
}

Kernels pick(const std::string &force) {
#ifdef __x86_64__
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  require(force != "avx2" || has_avx2, "this machine has no avx2");
  require(force != "avx512" || has_avx512, "this machine has no avx512");
  if (force == "avx512" || (force.empty() && has_avx512)) return {avx512::attend_chunk, avx512::encode, avx512::decode, avx512::unrotate};
  if (force == "avx2" || (force.empty() && has_avx2)) return {avx2::attend_chunk, avx2::encode, avx2::decode, avx2::unrotate};
#endif
  require(force.empty() || force == "scalar", "unknown instruction set");
  return {baseline::attend_chunk, baseline::encode, baseline::decode, baseline::unrotate};
}

Layout layout(size_t d, int k_bits, int v_bits, size_t words) {
  require(d == 64 || d == 128 || d == 256 || d == 512, "head dimension: expected 64, 128, 256 or 512");
  require(k_bits == 2 || k_bits == 4 || k_bits == 5 || k_bits == 8, "key bits: expected 2, 4, 5 or 8");
  require((v_bits >= 2 && v_bits <= 5) || v_bits == 8, "value bits: expected 2 to 5, or 8");
  const Layout at{d, k_bits, v_bits, tq_kv_affine_at(d, k_bits), tq_kv_values_at(d, k_bits), tq_kv_scales_at(d, k_bits, v_bits), tq_kv_words(d, k_bits, v_bits)};
  require(words == at.words, "records have another number of words");
  return at;
}

template <class T, int N> using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

// keys, values [tokens, d] -> records [tokens, words]
void encode(Array<const float, 2> keys, Array<const float, 2> values, Array<const float, 1> signs, Array<const float, 1> boundaries, int k_bits, int v_bits, Array<uint32_t, 2> records, int threads,
            const std::string &force) {
  const Layout at = layout(keys.shape(1), k_bits, v_bits, records.shape(1));
  require(values.shape(0) == keys.shape(0) && values.shape(1) == at.d && records.shape(0) == keys.shape(0), "keys, values and records differ");
  require(signs.shape(0) == at.d && boundaries.shape(0) + 1 == (size_t)1 << v_bits, "signs or boundaries do not fit");
  const Kernels run = pick(force);
  nb::gil_scoped_release release;
  tq::parallel_for(keys.shape(0), kGrain, threads, [&](size_t first, size_t last) { run.encode(at, keys.data(), values.data(), first, last, signs.data(), boundaries.data(), records.data()); });
}

// records [heads, room, words], of each head the first `tokens` -> keys, rotated values [heads, tokens, d]
void decode(Array<const uint32_t, 3> records, size_t tokens, Array<const float, 1> levels, int k_bits, int v_bits, Array<float, 3> keys, Array<float, 3> rotated, int threads,
            const std::string &force) {
  const Layout at = layout(keys.shape(2), k_bits, v_bits, records.shape(2));
  const size_t heads = records.shape(0), room = records.shape(1);
  require(tokens <= room && keys.shape(0) == heads && keys.shape(1) == tokens, "keys do not fit the records");
  require(rotated.shape(0) == heads && rotated.shape(1) == tokens && rotated.shape(2) == at.d, "values do not fit the records");
  require(levels.shape(0) == (size_t)1 << v_bits, "levels do not fit");
  const Kernels run = pick(force);
  const size_t pieces = (tokens + kChunk - 1) / kChunk;
  nb::gil_scoped_release release;
  tq::parallel_for(heads * pieces, 1, threads, [&](size_t begin, size_t end) {
    for (size_t item = begin; item < end; item++) {
      const size_t head = item / pieces, first = item % pieces * kChunk, last = first + kChunk < tokens ? first + kChunk : tokens;
      run.decode(at, records.data() + head * room * at.words, first, last, levels.data(), keys.data() + head * tokens * at.d, rotated.data() + head * tokens * at.d);
    }
  });
}

// queries [rows, d], records [heads, room, words] -> out [rows, d]
void attend(Array<const float, 2> queries, Array<const uint32_t, 3> records, size_t tokens, Array<const float, 1> levels, Array<const float, 1> signs, int k_bits, int v_bits, float scale,
            Array<float, 2> out, int threads, const std::string &force) {
  const Layout at = layout(queries.shape(1), k_bits, v_bits, records.shape(2));
  const size_t rows = queries.shape(0), heads = records.shape(0), room = records.shape(1);
  require(heads > 0 && rows > 0 && rows % heads == 0, "query heads are not shared by the KV heads");
  require(tokens > 0 && tokens <= room, "tokens do not fit the records");
  require(out.shape(0) == rows && out.shape(1) == at.d, "out does not fit the queries");
  require(signs.shape(0) == at.d && levels.shape(0) == (size_t)1 << v_bits, "signs or levels do not fit");
  const Kernels run = pick(force);
  const size_t shared = rows / heads, chunks = (tokens + kChunk - 1) / kChunk, line = shared * (at.d + 2);
  nb::gil_scoped_release release;
  std::vector<float> parts(heads * chunks * line, 0.0f);
  tq::parallel_for(heads * chunks, 1, threads, [&](size_t begin, size_t end) {
    std::vector<float> scratch(at.d + kChunk * shared);
    for (size_t item = begin; item < end; item++) {
      const size_t head = item / chunks, first = item % chunks * kChunk, last = first + kChunk < tokens ? first + kChunk : tokens;
      float *part = parts.data() + item * line;
      run.attend_chunk(at, records.data() + head * room * at.words, first, last, queries.data() + head * shared * at.d, shared, scale, levels.data(), part, part + shared * at.d,
                       part + shared * (at.d + 1), scratch.data());
    }
  });
  tq::parallel_for(rows, 1, threads, [&](size_t begin, size_t end) {
    for (size_t row = begin; row < end; row++) {
      const size_t head = row / shared, r = row % shared;
      float *y = out.data() + row * at.d, top = -INFINITY, denominator = 0.0f;
      for (size_t c = 0; c < chunks; c++) {
        const float largest = parts[(head * chunks + c) * line + shared * at.d + r];
        if (!(largest <= top)) top = largest;
      }
      for (size_t i = 0; i < at.d; i++) y[i] = 0.0f;
      for (size_t c = 0; c < chunks; c++) {
        const float *part = parts.data() + (head * chunks + c) * line;
        const float weight = std::exp(part[shared * at.d + r] - top);
        denominator += weight * part[shared * (at.d + 1) + r];
        for (size_t i = 0; i < at.d; i++) y[i] += weight * part[r * at.d + i];
      }
      for (size_t i = 0; i < at.d; i++) y[i] /= denominator;
      run.unrotate(signs.data(), at.d, y);
    }
  });
}

}  // namespace

void bind_kv(nb::module_ &m) {
  m.def("kv_encode", &encode, nb::arg("keys").noconvert(), nb::arg("values").noconvert(), nb::arg("signs"), nb::arg("boundaries"), nb::arg("k_bits"), nb::arg("v_bits"), nb::arg("records").noconvert(),
        nb::arg("threads"), nb::arg("force"));
  m.def("kv_decode", &decode, nb::arg("records").noconvert(), nb::arg("tokens"), nb::arg("levels"), nb::arg("k_bits"), nb::arg("v_bits"), nb::arg("keys").noconvert(), nb::arg("rotated").noconvert(),
        nb::arg("threads"), nb::arg("force"));
  m.def("kv_attend", &attend, nb::arg("queries").noconvert(), nb::arg("records").noconvert(), nb::arg("tokens"), nb::arg("levels"), nb::arg("signs"), nb::arg("k_bits"), nb::arg("v_bits"),
        nb::arg("scale"), nb::arg("out").noconvert(), nb::arg("threads"), nb::arg("force"));
}
