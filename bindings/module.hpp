// What the module consists of.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>

#include <functional>
#include <memory>

#include "unisono/transport.hpp"

namespace unisono::python {

void bind_communicator(nanobind::module_& module);

// What a communicator of the fabric lane is made with.
void bind_fabric(nanobind::module_& module);

// What each collective, algorithm and dtype is.
void bind_traits(nanobind::module_& module);

// What carries messages between nodes.
void bind_transports(nanobind::module_& module);
// Calls `make`, which gives a Transport or an object of that protocol; None: none.
std::function<std::shared_ptr<Transport>()> transport_factory(nanobind::object make);

// Where the extension is built with CUDA.
void bind_links(nanobind::module_& module);

// C++ errors become the classes of unisono.errors.
void bind_errors();

}  // namespace unisono::python
