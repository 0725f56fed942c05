#include "cpu/module.h"
void bind_hadamard(nanobind::module_ &) {}
