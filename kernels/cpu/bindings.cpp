// tqtool._native: the compiled half of tqtool. tqtool/native.py gives it types and docstrings.
#include "cpu/module.h"

NB_MODULE(_native, m) {
  bind_hadamard(m);
  bind_encode(m);
  bind_coding(m);
  bind_decode(m);
  bind_affine(m);
  bind_kv(m);
}
