#include "module.hpp"

#include "array.hpp"
#include "unisono/error.hpp"

namespace unisono::python {

namespace nb = nanobind;

void bind_errors() {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    auto raise = [](const char* name, const std::exception& error) {
      PyErr_SetString(nb::module_::import_("unisono.errors").attr(name).ptr(), error.what());
    };
    try {
      std::rethrow_exception(thrown);
    } catch (const UsageError& error) { raise("UsageError", error); } catch (const MismatchError& error) {
      raise("MismatchError", error);
    } catch (const TimeoutError& error) { raise("TimeoutError", error); } catch (const PeerLostError& error) {
      raise("PeerLostError", error);
    } catch (const ResourceError& error) { raise("ResourceError", error); } catch (const Error& error) {
      raise("UnisonoError", error);
    }
  });
}

}  // namespace unisono::python

NB_MODULE(_core, module) {
  module.doc() = "The compiled core of Unisono. Use it through the package unisono.";
  module.attr("version") = UNISONO_VERSION;
  // A library that leaks may hold a program's communicator to the end. The communicator is closed by then,
  // and the user can do nothing about the leak.
  nanobind::set_leak_warnings(false);
  unisono::python::bind_errors();
  nanobind::module_::import_("atexit").attr("register")(
      nanobind::cpp_function(&unisono::python::forget_libraries));
  unisono::python::bind_fabric(module);
  unisono::python::bind_transports(module);
  unisono::python::bind_combine(module);
  unisono::python::bind_moe(module);
  unisono::python::bind_norm(module);
  unisono::python::bind_window(module);
  unisono::python::bind_communicator(module);
  unisono::python::bind_traits(module);
#ifdef UNISONO_CUDA
  unisono::python::bind_links(module);
#endif
}
