// What each half of the bindings offers to module.cc.
// The namespace is not `atoll` because the C library has a function of that name.
#pragma once
#include <nanobind/nanobind.h>

namespace atoll_core {
void bind_kernels(nanobind::module_& m);
void bind_engine(nanobind::module_& m);
}  // namespace atoll_core
