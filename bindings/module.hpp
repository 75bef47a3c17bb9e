// What the module consists of.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>

namespace unisono::python {

void bind_communicator(nanobind::module_& module);

// What a communicator of the fabric lane is made with.
void bind_fabric(nanobind::module_& module);

// What each collective, algorithm and dtype is.
void bind_traits(nanobind::module_& module);

// What the collectives across nodes (python/unisono/nodes/) take from the core.
void bind_nodes(nanobind::module_& module);

// The same, of MPI's calls.
void bind_mpi(nanobind::module_& module);

// Where the extension is built with CUDA.
void bind_links(nanobind::module_& module);

// C++ errors become the classes of unisono.errors.
void bind_errors();

}  // namespace unisono::python
