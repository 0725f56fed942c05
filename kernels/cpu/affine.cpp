// Affine round to nearest, the arithmetic of mx.quantize on the CPU to the bit. For each group of a row, in float32:
//
//     low, high = min w, max w;   n = 2^bits - 1
//     scale = max((high - low) / n, 1e-7), negative unless |low| > |high|
//     edge  = the end farther from zero;   q0 = rint(edge / scale)
//     if q0 != 0:  scale = edge / q0, bias = edge     else:  bias = 0
//     code  = clamp(rint((w - bias) / scale), 0, n)
//
// so the far end is hit exactly and zero stays on the grid; with one bit scale = max(high - low, 1e-7), bias = low.
// Codes are packed as docs/formats/affine.md says. Every operation is one IEEE operation (-ffp-contract=off), so the
// vector width and the number of threads do not matter. MLX's own loop is scalar; this one is what lets convert run
// at the speed of hashing.
//
// Layouts: weight [groups, group] of float or bfloat16 bits; words [groups, group * bits / 8] bytes; scales, biases
// [groups] float32, to be rounded to the model's dtype by the caller.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include "cpu/module.h"
#include "cpu/parallel.h"

namespace nb = nanobind;

namespace {

constexpr int MAX_GROUP = 128;
constexpr float SMALLEST_SCALE = 1e-7f;
constexpr std::size_t GRAIN = 1024; // groups handed to a thread at a time: tens of microseconds

struct Spec {
  int bits, group;
};

struct Grid {
  float scale, bias;
};

inline Grid grid_of(float low, float high, float levels) {
  const float step = (high - low) / levels;
  const float width = step > SMALLEST_SCALE ? step : SMALLEST_SCALE;
  if (levels == 1.0f) return Grid{width, low};
  const bool low_is_edge = std::fabs(low) > std::fabs(high);
  const float scale = low_is_edge ? width : -width, edge = low_is_edge ? low : high;
  const float q0 = std::rint(edge / scale);
  return q0 == 0.0f ? Grid{scale, 0.0f} : Grid{edge / q0, edge};
}

inline void widen(const float *w, int group, float *x) { std::memcpy(x, w, group * sizeof(float)); }

inline void widen(const std::uint16_t *w, int group, float *x) {
  for (int i = 0; i < group; ++i) {
    const std::uint32_t bits = static_cast<std::uint32_t>(w[i]) << 16;
    std::memcpy(x + i, &bits, sizeof bits);
  }
}

// Eight codes make `bits` whole bytes, lowest first.
inline void pack_group(const std::int32_t *codes, int group, int bits, std::uint8_t *out) {
  for (int i = 0; i < group; i += 8, out += bits) {
    std::uint64_t word = 0;
    for (int j = 0; j < 8; ++j) word |= static_cast<std::uint64_t>(codes[i + j]) << (j * bits);
    for (int j = 0; j < bits; ++j) out[j] = static_cast<std::uint8_t>(word >> (8 * j));
  }
}

#if defined(__x86_64__) && defined(__clang__)
#define TQ_TARGET_PUSH_AVX2 _Pragma("clang attribute push(__attribute__((target(\"avx2\"))), apply_to = function)")
#define TQ_TARGET_PUSH_AVX512 _Pragma("clang attribute push(__attribute__((target(\"avx512f\"))), apply_to = function)")
#define TQ_TARGET_POP _Pragma("clang attribute pop")
#elif defined(__x86_64__)
#define TQ_TARGET_PUSH_AVX2 _Pragma("GCC push_options") _Pragma("GCC target(\"avx2\")")
#define TQ_TARGET_PUSH_AVX512 _Pragma("GCC push_options") _Pragma("GCC target(\"avx512f\")")
#define TQ_TARGET_POP _Pragma("GCC pop_options")
#endif

namespace baseline { // SSE2 or NEON: part of the architecture
#define TQ_VECTOR_BYTES 16
#include "cpu/affine.inl"
#undef TQ_VECTOR_BYTES
} // namespace baseline

#ifdef __x86_64__
TQ_TARGET_PUSH_AVX2
namespace avx2 {
#define TQ_VECTOR_BYTES 32
#include "cpu/affine.inl"
#undef TQ_VECTOR_BYTES
} // namespace avx2
TQ_TARGET_POP
TQ_TARGET_PUSH_AVX512
namespace avx512 {
#define TQ_VECTOR_BYTES 64
#include "cpu/affine.inl"
#undef TQ_VECTOR_BYTES
} // namespace avx512
TQ_TARGET_POP
#endif

template <typename T>
using Quantize = void (*)(const T *, std::uint8_t *, float *, float *, const Spec &, std::size_t, std::size_t);

void require(bool holds, const char *message) {
  if (!holds) throw std::invalid_argument(message);
}

template <typename T> Quantize<T> pick(const std::string &force) {
#ifdef __x86_64__
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2"), has_avx512 = __builtin_cpu_supports("avx512f");
  require(force != "avx2" || has_avx2, "this machine has no avx2");
  require(force != "avx512" || has_avx512, "this machine has no avx512");
  if (force == "avx512" || (force.empty() && has_avx512)) return avx512::quantize_groups<T>;
  if (force == "avx2" || (force.empty() && has_avx2)) return avx2::quantize_groups<T>;
#endif
  require(force.empty() || force == "scalar", "unknown instruction set");
  return baseline::quantize_groups<T>;
}

template <typename T> using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu>;

template <typename T>
void quantize(const Array<const T> &weight, const Array<std::uint32_t> &words, const Array<float> &scales,
              const Array<float> &biases, int bits, int group, int threads, const std::string &force) {
  require(bits >= 1 && bits <= 8, "bits: expected 1 to 8");
  require(group >= 32 && group <= MAX_GROUP && group % 32 == 0, "group: expected 32, 64, 96 or 128");
  require(weight.size() % group == 0, "weight: expected whole groups");
  const std::size_t groups = weight.size() / group;
  require(scales.size() == groups && biases.size() == groups, "scales, biases: expected one per group");
  require(words.size() == groups * group * bits / 32, "words: expected bits / 32 per weight");
  const Quantize<T> run = pick<T>(force);
  auto *bytes = reinterpret_cast<std::uint8_t *>(words.data());
  nb::gil_scoped_release release;
  tq::parallel_for(groups, GRAIN, threads, [&](std::size_t first, std::size_t last) {
    run(weight.data(), bytes, scales.data(), biases.data(), Spec{bits, group}, first, last);
  });
}

template <typename T> void bind_quantize(nb::module_ &m, const char *name) {
  m.def(name, &quantize<T>, nb::arg("weight").noconvert(), nb::arg("words").noconvert(),
        nb::arg("scales").noconvert(), nb::arg("biases").noconvert(), nb::arg("bits"), nb::arg("group"),
        nb::arg("threads"), nb::arg("force"));
}

} // namespace

void bind_affine(nb::module_ &m) {
  bind_quantize<float>(m, "affine_quantize_f32");
  bind_quantize<std::uint16_t>(m, "affine_quantize_bf16");
}
