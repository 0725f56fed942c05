// What a Metal kernel sees when g++ compiles it: types, checked memory, SIMD operations. text.py has rewritten pointers to device and
// constant memory as shim::Buffer, threadgroup arrays as shim::Shared and pointers into them as shim::SharedPtr.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace shim {
constexpr int SIMD = 32, MAX_LANES = 1024, MAX_SHARED = 32 * 1024;

[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

// ------------------------------------------------------------------------------------------------------------ lanes
struct Position {
  uint32_t x, y, z;
};
extern int lane;                 // the one that runs
extern Position group, threads;  // of the threadgroup in the grid; of its threads
extern uint32_t serial;          // counts threadgroups from 1
// Barriers so far, of all threadgroups and of each SIMD group of this one; those that order each kind of memory.
enum Space { THREADGROUP, DEVICE, SPACES };
extern uint32_t epoch[SPACES], simd_epoch[SPACES][MAX_LANES / SIMD];

// Waits for all lanes of the SIMD group to come to the same place, and returns what each of them brought.
struct Packet {
  uint32_t word[4];
};
const Packet *exchange(const Packet &mine, const char *what, int line);
void barrier(int line, int flags);
void simd_barrier(int line, int flags);

// Who touched a cell of memory last, and when.
template <Space S> struct Touch {
  uint32_t serial = 0, epoch = 0, simd_epoch = 0;
  int lane = 0;
  bool here() const { return serial == shim::serial; }
  // Whether everything that `lane` did then is done before what the lane that runs does now.
  bool before_now() const {
    if (!here() || lane == shim::lane || epoch != shim::epoch[S]) return true;
    return lane >= 0 && lane / SIMD == shim::lane / SIMD && simd_epoch != shim::simd_epoch[S][lane / SIMD];
  }
  void now() {
    serial = shim::serial, epoch = shim::epoch[S], simd_epoch = shim::simd_epoch[S][shim::lane / SIMD], lane = shim::lane;
  }
};

template <Space S> struct Access {
  Touch<S> write, read;
  void check_read(const char *name, long long index) {
    if (!write.here()) fail("%s[%lld] is read before it is written", name, index);
    if (!write.before_now()) fail("%s[%lld]: lane %d reads what lane %d wrote without a barrier between", name, index, lane, write.lane);
    const bool shared = !read.before_now();
    read.now();
    if (shared) read.lane = -1;  // several: only a barrier of all orders them
  }
  void check_write(const char *name, long long index) {
    if (!write.before_now()) fail("%s[%lld]: lanes %d and %d write without a barrier between", name, index, write.lane, lane);
    if (!read.before_now()) fail("%s[%lld]: lane %d writes what lane %d read without a barrier between", name, index, lane, read.lane);
    write.now();
  }
};

// ---------------------------------------------------------------------------------------------------- device memory
struct Memory {
  const char *name;
  char *data;
  uint64_t bytes, element;  // of all of it, of one element
  enum Kind : uint64_t { INPUT, OUTPUT, SCRATCH } kind;  // an output is written once and not read; scratch serves its threadgroup
  Access<DEVICE> *accesses;                              // one for each element of an output
};
extern Memory memory[32];

template <class T> struct Element {
  Memory *of;
  int64_t index;
  void operator=(T value) {
    Access<DEVICE> &access = of->accesses[index];
    if (of->kind == Memory::OUTPUT && access.write.serial) fail("%s[%lld] is written twice", of->name, (long long)index);
    if (access.write.serial && !access.write.here()) fail("%s[%lld] is written by two threadgroups", of->name, (long long)index);
    access.check_write(of->name, index);
    memcpy(of->data + index * sizeof(T), &value, sizeof value);
  }
  operator T() const {
    if (of->kind != Memory::SCRATCH) fail("%s[%lld] is read, but it is a result", of->name, (long long)index);
    of->accesses[index].check_read(of->name, index);
    T value;
    memcpy(&value, of->data + index * sizeof(T), sizeof value);
    return value;
  }
};

template <class T> struct Buffer {
  Memory *of = nullptr;
  int64_t offset = 0;
  Buffer() = default;
  Buffer(Memory *memory, int64_t at) : of(memory), offset(at) {}
  int64_t checked(int64_t index) const {
    index += offset;
    if (index < 0 || (uint64_t)index * sizeof(T) >= of->bytes) fail("%s[%lld] is out of bounds: %lld elements", of->name, (long long)index, (long long)(of->bytes / sizeof(T)));
    return index;
  }
  Element<T> operator[](int64_t index) const { return {of, checked(index)}; }
  Buffer operator+(int64_t by) const { return {of, offset + by}; }
  Buffer &operator+=(int64_t by) { return offset += by, *this; }
};
template <class T> struct Buffer<const T> {
  Buffer<T> inner;
  Buffer() = default;
  Buffer(Memory *memory, int64_t at) : inner(memory, at) {}
  T operator[](int64_t index) const {
    T value;
    memcpy(&value, inner.of->data + inner.checked(index) * sizeof(T), sizeof value);
    return value;
  }
  Buffer operator+(int64_t by) const { return {inner.of, inner.offset + by}; }
  Buffer &operator+=(int64_t by) { return inner.offset += by, *this; }
};

// ----------------------------------------------------------------------------------------------- threadgroup memory
void claim_shared(const char *name, uint64_t bytes);

template <class T> struct Cell {
  T value;
  Access<THREADGROUP> access;
};
template <class T> struct SharedRef;
template <class T> struct SharedPtr {
  Cell<T> *cells;
  const char *name;
  int64_t size, offset;
  SharedRef<T> operator[](int64_t index) const { return {{cells, name, size, offset + index}}; }
  SharedPtr operator+(int64_t by) const { return {cells, name, size, offset + by}; }
  Cell<T> &cell() const {
    if (offset < 0 || offset >= size) fail("%s[%lld] is out of bounds: %lld elements", name, (long long)offset, (long long)size);
    return cells[offset];
  }
  T get() const {
    cell().access.check_read(name, offset);
    return cell().value;
  }
  void put(T value) const {
    cell().access.check_write(name, offset);
    cell().value = value;
  }
};
template <class T> struct SharedRef {
  const SharedPtr<T> at;
  operator T() const { return at.get(); }
  void operator=(T value) { at.put(value); }
  void operator=(const SharedRef &other) { at.put(other.at.get()); }
  void operator+=(T value) { at.put(at.get() + value); }
  SharedPtr<T> operator&() const { return at; }
};
template <class T, int64_t N> struct Shared {
  Cell<T> cells[N];
  const char *name;
  explicit Shared(const char *what) : name(what) { claim_shared(what, N * sizeof(T)); }
  SharedRef<T> operator[](int64_t index) { return operator SharedPtr<T>()[index]; }
  operator SharedPtr<T>() { return {cells, name, N, 0}; }
};
}  // namespace shim

// ------------------------------------------------------------------------------------------------------------ types
#define thread
#define METAL_FUNC inline
typedef uint32_t uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef uint64_t ulong;
typedef _Float16 half;
typedef _Float16 float16_t;
typedef shim::Position uint3;
struct ushort2 {
  uint16_t x, y;
};
struct half2 {
  half x, y;
};
struct ulong2 {
  ulong x, y;
  explicit ulong2(ulong both) : x(both), y(both) {}
};
struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float value) {
    uint32_t u;
    memcpy(&u, &value, 4);
    bits = value != value ? 0x7FC0 : (u + 0x7FFF + (u >> 16 & 1)) >> 16;
  }
  operator float() const {
    const uint32_t u = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &u, 4);
    return value;
  }
};
namespace shim {
template <class T, class U> inline T bits_of(const U &from) {
  static_assert(sizeof(T) == sizeof(U), "as_type keeps the size");
  T to;
  memcpy(&to, &from, sizeof to);
  return to;
}
}  // namespace shim
template <class T, class U> inline T as_type(U from) { return shim::bits_of<T>(from); }
template <class T, class U> inline T as_type(shim::SharedRef<U> from) { return shim::bits_of<T>(U(from)); }
template <class T> inline T min(T a, T b) { return b < a ? b : a; }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }
namespace metal {
inline float fma(float a, float b, float c) { return fmaf(a, b, c); }
inline float rint(float x) { return rintf(x); }
using ::as_type;
using ::max;
using ::min;
namespace precise {
inline float exp(float x) { return expf(x); }
inline float exp2(float x) { return exp2f(x); }
inline float sqrt(float x) { return sqrtf(x); }
}  // namespace precise
}  // namespace metal

// ------------------------------------------------------------------------------------------------------- operations
namespace mem_flags {
constexpr int mem_none = 0, mem_threadgroup = 1 << shim::THREADGROUP, mem_device = 1 << shim::DEVICE;
}
inline void threadgroup_barrier(int flags, int line = __builtin_LINE()) { shim::barrier(line, flags); }
inline void simdgroup_barrier(int flags, int line = __builtin_LINE()) { shim::simd_barrier(line, flags); }

namespace shim {
template <class T> struct Gathered {
  T value[SIMD];
  Gathered(T mine, const char *what, int line) {
    static_assert(sizeof(T) <= sizeof(Packet), "fits");
    Packet packet = {};
    memcpy(&packet, &mine, sizeof mine);
    const Packet *all = exchange(packet, what, line);
    for (int l = 0; l < SIMD; ++l) memcpy(&value[l], &all[l], sizeof(T));
  }
};
}  // namespace shim
template <class T> inline T simd_sum(T value, int line = __builtin_LINE()) {
  shim::Gathered<T> all(value, "simd_sum", line);
  for (int half_width = shim::SIMD / 2; half_width; half_width /= 2)
    for (int l = 0; l < half_width; ++l) all.value[l] = all.value[l] + all.value[l + half_width];
  return all.value[0];
}
template <class T> inline T simd_min(T value, int line = __builtin_LINE()) {
  shim::Gathered<T> all(value, "simd_min", line);
  T least = all.value[0];
  for (T other : all.value) least = min(least, other);
  return least;
}
template <class T> inline T simd_shuffle_xor(T value, uint mask, int line = __builtin_LINE()) {
  shim::Gathered<T> all(value, "simd_shuffle_xor", line);
  return all.value[(shim::lane ^ mask) % shim::SIMD];
}
template <class T> inline T simd_shuffle(T value, uint from, int line = __builtin_LINE()) {
  shim::Gathered<T> all(value, "simd_shuffle", line);
  return all.value[from % shim::SIMD];
}

// A lane has two neighbours of a row: which lane has which is the hardware's own business, and no kernel may know it.
struct simdgroup_float8x8 {
  float own[2];
};
template <class T, int, int> inline simdgroup_float8x8 make_filled_simdgroup_matrix(T value) { return {{value, value}}; }
inline int matrix_row() { return shim::lane % shim::SIMD / 4; }
inline int matrix_col() { return shim::lane % 4 * 2; }
inline void simdgroup_load(simdgroup_float8x8 &to, shim::SharedPtr<float> from, ulong line_length, ulong2 = ulong2(0), bool transposed = false, int line = __builtin_LINE()) {
  shim::exchange({}, "simdgroup_load", line);
  for (int i = 0; i < 2; ++i) {
    const int row = matrix_row(), col = matrix_col() + i;
    to.own[i] = transposed ? from[col * line_length + row] : from[row * line_length + col];
  }
}
inline void simdgroup_store(const simdgroup_float8x8 &from, shim::SharedPtr<float> to, ulong line_length, int line = __builtin_LINE()) {
  shim::exchange({}, "simdgroup_store", line);
  for (int i = 0; i < 2; ++i) to[matrix_row() * line_length + matrix_col() + i] = from.own[i];
}
inline void simdgroup_multiply_accumulate(simdgroup_float8x8 &to, const simdgroup_float8x8 &a, const simdgroup_float8x8 &b, const simdgroup_float8x8 &c, int line = __builtin_LINE()) {
  struct Operands {
    float a[2], b[2];
  };
  shim::Gathered<Operands> all({{a.own[0], a.own[1]}, {b.own[0], b.own[1]}}, "simdgroup_multiply_accumulate", line);
  float sums[2] = {c.own[0], c.own[1]};
  for (int i = 0; i < 2; ++i)
    for (int k = 0; k < 8; ++k) sums[i] = fmaf(all.value[matrix_row() * 4 + k / 2].a[k % 2], all.value[k * 4 + matrix_col() / 2].b[i], sums[i]);
  for (int i = 0; i < 2; ++i) to.own[i] = sums[i];
}
