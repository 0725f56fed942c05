// One binding function per source file; bindings.cpp calls them all.
#pragma once
#include <nanobind/nanobind.h>

void bind_hadamard(nanobind::module_ &m);
void bind_encode(nanobind::module_ &m);
void bind_coding(nanobind::module_ &m);
void bind_decode(nanobind::module_ &m);
void bind_affine(nanobind::module_ &m);
void bind_kv(nanobind::module_ &m);
