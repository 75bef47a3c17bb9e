// One function for each public header.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>

namespace unisono::python {

void bind_communicator(nanobind::module_& module);

// What the collectives across nodes (python/unisono/nodes/) take from the core.
void bind_nodes(nanobind::module_& module);

// Where the extension is built with CUDA (no public header).
void bind_links(nanobind::module_& module);

// C++ errors become the classes of unisono.errors.
void bind_errors();

}  // namespace unisono::python
