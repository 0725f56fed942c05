// Runs a grid: reads launch and buffers from stdin, gives every lane of a threadgroup a fibre, writes the outputs to stdout. What a kernel
// does wrong ends the process with a line on stderr.
//
// Lanes run one after another from one place where they must meet to the next. At each stop all lanes of a SIMD group must be at the same
// one; at a barrier, all of the threadgroup.
#if defined(__APPLE__)
#define _XOPEN_SOURCE 700  // ucontext
#define _DARWIN_C_SOURCE
#endif
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "msl.h"

void call_kernel();                    // one lane, written by text.py
extern const char *const buffer_names[];  // of every buffer, in the order of their indices, then null

namespace shim {
int lane;
Position group, threads;
uint32_t serial, epoch[SPACES], simd_epoch[SPACES][MAX_LANES / SIMD];
Memory memory[32];

void fail(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vfprintf(stderr, format, arguments);
  fprintf(stderr, " (lane %d of threadgroup %u, %u, %u)\n", lane, group.x, group.y, group.z);
  fflush(stderr);
  _exit(3);
}

static uint64_t shared_bytes;
void claim_shared(const char *name, uint64_t bytes) {
  shared_bytes += bytes;
  if (shared_bytes > MAX_SHARED) fail("threadgroup memory: %llu bytes with %s, at most %d", (unsigned long long)shared_bytes, name, MAX_SHARED);
}

// ----------------------------------------------------------------------------------------------------------- fibres
constexpr size_t STACK = 128 << 10;
static char *stacks;

#if defined(__x86_64__) && !defined(SHIM_UCONTEXT)
extern "C" void shim_switch(void **save, void *to);
asm(R"(
.text
.globl shim_switch
.type shim_switch,@function
shim_switch:
 pushq %rbp
 pushq %rbx
 pushq %r12
 pushq %r13
 pushq %r14
 pushq %r15
 movq %rsp,(%rdi)
 movq %rsi,%rsp
 popq %r15
 popq %r14
 popq %r13
 popq %r12
 popq %rbx
 popq %rbp
 ret
)");
static void *scheduler, *fibres[MAX_LANES];
static void enter(int l) { shim_switch(&scheduler, fibres[l]); }
static void leave() { shim_switch(&fibres[lane], scheduler); }
static void prepare(int l, void (*body)()) {
  void **top = reinterpret_cast<void **>(stacks + STACK * (l + 1));
  *--top = nullptr;  // alignment: a function begins 8 below a multiple of 16
  *--top = reinterpret_cast<void *>(body);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fibres[l] = top;
}
#else
}  // namespace shim
#include <ucontext.h>
namespace shim {
static ucontext_t scheduler, fibres[MAX_LANES];
static void enter(int l) { swapcontext(&scheduler, &fibres[l]); }
static void leave() { swapcontext(&fibres[lane], &scheduler); }
static void prepare(int l, void (*body)()) {
  getcontext(&fibres[l]);
  fibres[l].uc_stack.ss_sp = stacks + STACK * l;
  fibres[l].uc_stack.ss_size = STACK;
  fibres[l].uc_link = nullptr;
  makecontext(&fibres[l], body, 0);
}
#endif

// ------------------------------------------------------------------------------------------------------------ stops
enum Kind { RUNS, SIMD_OPERATION, BARRIER, END };
struct Stop {
  Kind kind;
  const char *what;
  int line, flags;  // memory that the stop orders
};
static Stop stops[MAX_LANES];
static Packet packets[2][MAX_LANES];
static uint8_t parity[MAX_LANES];

static void stop(Stop at) {
  stops[lane] = at;
  leave();
}
const Packet *exchange(const Packet &mine, const char *what, int line) {
  const int side = parity[lane] ^= 1, base = lane / SIMD * SIMD;  // two sides: a fast lane writes the next before a slow one has read this
  packets[side][lane] = mine;
  stop({SIMD_OPERATION, what, line, 0});
  return &packets[side][base];
}
void barrier(int line, int flags) { stop({BARRIER, "threadgroup_barrier", line, flags}); }
void simd_barrier(int line, int flags) { stop({SIMD_OPERATION, "simdgroup_barrier", line, flags}); }

static void body() {
  call_kernel();
  stop({END, "the end", 0, 0});
  abort();
}

static void meet(int first, int count, const char *who) {
  const Stop &a = stops[first];
  for (int l = first + 1; l < first + count; ++l) {
    const Stop &b = stops[l];
    if (a.kind != b.kind || a.line != b.line || a.what != b.what)
      fail("divergent %s: lane %d is at %s (line %d), lane %d at %s (line %d)", who, first, a.what, a.line, l, b.what, b.line);
  }
}

static void run_group(int lanes) {
  ++serial;
  for (int l = 0; l < lanes; ++l) {
    prepare(l, body);
    parity[l] = 0;
  }
  for (;;) {
    for (int first = 0; first < lanes; first += SIMD) {
      do {
        for (lane = first; lane < first + SIMD; ++lane) enter(lane);
        lane = first;
        meet(first, SIMD, "simdgroup");
        if (stops[first].kind == SIMD_OPERATION)
          for (int space = 0; space < SPACES; ++space) simd_epoch[space][first / SIMD] += stops[first].flags >> space & 1;
      } while (stops[first].kind == SIMD_OPERATION);
    }
    lane = 0;
    meet(0, lanes, "threadgroup");
    if (stops[0].kind == END) return;
    for (int space = 0; space < SPACES; ++space) epoch[space] += stops[0].flags >> space & 1;
  }
}
}  // namespace shim

template <class T> static T take() {
  T value;
  if (fread(&value, sizeof value, 1, stdin) != 1) abort();
  return value;
}

int main() {
  using namespace shim;
  const Position grid = take<Position>();
  threads = take<Position>();
  const int lanes = threads.x * threads.y * threads.z;
  if (lanes > MAX_LANES || lanes % SIMD) fail("%d threads in a threadgroup", lanes);
  int count = 0;
  for (; buffer_names[count]; ++count) {
    Memory &m = memory[count];
    m.name = buffer_names[count];
    m.kind = take<Memory::Kind>();
    m.element = take<uint64_t>();
    m.bytes = take<uint64_t>();
    m.data = static_cast<char *>(malloc(m.bytes + 1));
    if (m.kind != Memory::INPUT)
      m.accesses = new Access<DEVICE>[m.bytes / m.element];
    else if (fread(m.data, 1, m.bytes, stdin) != m.bytes)
      abort();
  }
  stacks = static_cast<char *>(aligned_alloc(4096, STACK * lanes));
  for (group.z = 0; group.z < grid.z / threads.z; ++group.z)
    for (group.y = 0; group.y < grid.y / threads.y; ++group.y)
      for (group.x = 0; group.x < grid.x / threads.x; ++group.x) run_group(lanes);
  fwrite(&shared_bytes, sizeof shared_bytes, 1, stdout);
  for (int i = 0; i < count; ++i) {
    const Memory &m = memory[i];
    if (m.kind != Memory::OUTPUT) continue;
    fwrite(m.data, 1, m.bytes, stdout);
    for (uint64_t e = 0; e < m.bytes / m.element; ++e)
      if (!m.accesses[e].write.serial) fail("%s[%llu] is never written", m.name, (unsigned long long)e);
  }
  return 0;
}
