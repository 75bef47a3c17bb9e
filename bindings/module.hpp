// The parts of the module unisono._core.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>

#include <functional>
#include <memory>

#include "unisono/transport.hpp"

namespace unisono::python {

void bind_communicator(nanobind::module_& module);

void bind_moe(nanobind::module_& module);

// The sum of an all_reduce, of arrays that one process has.
void bind_combine(nanobind::module_& module);

// The options of the fused norms.
void bind_norm(nanobind::module_& module);

// The windows, into which GPUs put data.
void bind_window(nanobind::module_& module);

// The options and providers of the fabric lane.
void bind_fabric(nanobind::module_& module);

// The properties of each collective, algorithm and dtype.
void bind_traits(nanobind::module_& module);

// The transports, which carry messages between nodes.
void bind_transports(nanobind::module_& module);
// Returns a function that calls `make`, which returns a Transport or an object of that protocol. None: an
// empty function.
std::function<std::shared_ptr<Transport>()> transport_factory(nanobind::object make);

// Only if the extension is built with CUDA.
void bind_links(nanobind::module_& module);

// Makes C++ errors the classes of unisono.errors.
void bind_errors();

}  // namespace unisono::python
