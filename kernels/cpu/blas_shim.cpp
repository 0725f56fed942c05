// A BLAS for MLX's CPU build on Linux.
//
// The wheel links netlib's reference BLAS: about 2.5 GFLOP/s on a machine where OpenBLAS reaches 140. A library in the
// global symbol scope wins over a dependency of libmlx.so, so this file defines the three CBLAS entries that libmlx
// imports (nm -D: cblas_sgemm, cblas_dgemm, cblas_cgemm) and forwards them to addresses that tqtool/runtime/blas.py
// looked up in an OpenBLAS it found. Nothing is resolved here: the library has no dependency and no policy.
//
// LP64 only (32-bit integers), as in libmlx's own calls.
#include <atomic>
#include <cstdio>
#include <cstdlib>

namespace {

using SgemmFn = void (*)(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);
using DgemmFn = void (*)(int, int, int, int, int, int, double, const double *, int, const double *, int, double, double *,
                         int);
using CgemmFn = void (*)(int, int, int, int, int, int, const void *, const void *, int, const void *, int, const void *,
                         void *, int);

SgemmFn sgemm = nullptr;
DgemmFn dgemm = nullptr;
CgemmFn cgemm = nullptr;
char source[4096] = "";
std::atomic<unsigned> calls{0};

[[noreturn]] void unbound(const char *name) {
  std::fprintf(stderr, "tqblas: %s was called before tq_blas_bind\n", name);
  std::abort();
}

}  // namespace

extern "C" {

// Addresses of the three functions and a description of where they come from. Call before MLX is loaded.
void tq_blas_bind(void *sgemm_address, void *dgemm_address, void *cgemm_address, const char *description) {
  sgemm = reinterpret_cast<SgemmFn>(sgemm_address);
  dgemm = reinterpret_cast<DgemmFn>(dgemm_address);
  cgemm = reinterpret_cast<CgemmFn>(cgemm_address);
  std::snprintf(source, sizeof source, "%s", description);
}

// The description given to tq_blas_bind; empty while unbound.
const char *tq_blas_source() { return source; }

// Products served so far, modulo 2^32: tells whether MLX really comes here.
unsigned tq_blas_calls() { return calls.load(std::memory_order_relaxed); }

void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc) {
  if (!sgemm) unbound("cblas_sgemm");
  calls.fetch_add(1, std::memory_order_relaxed);
  sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_dgemm(int order, int trans_a, int trans_b, int m, int n, int k, double alpha, const double *a, int lda,
                 const double *b, int ldb, double beta, double *c, int ldc) {
  if (!dgemm) unbound("cblas_dgemm");
  calls.fetch_add(1, std::memory_order_relaxed);
  dgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_cgemm(int order, int trans_a, int trans_b, int m, int n, int k, const void *alpha, const void *a, int lda,
                 const void *b, int ldb, const void *beta, void *c, int ldc) {
  if (!cgemm) unbound("cblas_cgemm");
  calls.fetch_add(1, std::memory_order_relaxed);
  cgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
}
