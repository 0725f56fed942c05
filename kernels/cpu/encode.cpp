// viterbi_encode: blocks of integers in, trellis states out, all cores.
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "cpu/module.h"
#include "cpu/parallel.h"
#include "cpu/viterbi.h"

namespace nb = nanobind;
using In = nb::ndarray<const int16_t, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Levels = nb::ndarray<const int16_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using States = nb::ndarray<uint16_t, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

namespace {

struct Free {
  void operator()(void *p) const { std::free(p); }
};
using Buffer = std::unique_ptr<float, Free>;

Buffer aligned(size_t floats) {
  void *p = std::aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64);
  if (!p) throw std::bad_alloc();
  return Buffer((float *)p);
}

std::string encode(In x, Levels levels, States states, int window, int bits, int warmup, int threads, const std::string &force) {
  const size_t blocks = x.shape(0), block = x.shape(1), count = (size_t)1 << window;
  if (levels.shape(0) != count || states.shape(0) != blocks || states.shape(1) != block) throw std::invalid_argument("shapes of levels or states do not fit");
  if (warmup < 1 || (size_t)warmup * 2 > block) throw std::invalid_argument("warmup must lie in [1, block / 2]");
  const char *name = "";
  const tq::EncodeBlock run = tq::select_encoder(bits, window, force.empty() ? nullptr : force.c_str(), &name);
  if (!run) throw std::invalid_argument("no encoder for this trellis on this machine");
  const tq::EncodeBlock wide = tq::encode_block_wide(bits, window);
  Buffer table = aligned(count);
  float lowest = levels(0), highest = levels(0);
  for (size_t s = 0; s < count; s++) {
    const float level = table.get()[s] = levels(s);
    lowest = level < lowest ? level : lowest;
    highest = level > highest ? level : highest;
  }
  const tq::Trellis t{window, bits, (int)block, warmup, table.get(), lowest, highest};
  const int16_t *in = x.data();
  uint16_t *out = states.data();
  nb::gil_scoped_release release;
  tq::parallel_for(blocks, blocks < 1024 ? 8 : 64, threads, [&](size_t begin, size_t end) {
    Buffer scratch = aligned(tq::scratch_floats(t)), values = aligned(block);
    for (size_t b = begin; b < end; b++) {
      for (size_t i = 0; i < block; i++) {
        const int v = in[b * block + i];
        values.get()[i] = (float)(v < -tq::kMaxAbsX ? -tq::kMaxAbsX : v > tq::kMaxAbsX ? tq::kMaxAbsX : v);
      }
      const int renormalise = tq::renormalise_every(t, values.get());
      (renormalise ? run : wide)(t, values.get(), renormalise ? renormalise : 16, out + b * block, scratch.get());
    }
  });
  return name;
}

}  // namespace

void bind_encode(nb::module_ &m) {
  m.def("viterbi_encode", &encode, nb::arg("x"), nb::arg("levels"), nb::arg("states"), nb::arg("window"), nb::arg("bits"), nb::arg("warmup"), nb::arg("threads"),
        nb::arg("force"));
}
