// DLPack's table of C functions, which torch.Tensor has (`__dlpack_c_exchange_api__`, DLPack 1.3). One call
// describes a tensor, instead of a call of Python for each property.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>

namespace unisono::python {

namespace nb = nanobind;

// The beginning of the table; the rest is not used.
struct ExchangeApi {
  struct {
    std::uint32_t major, minor;
    void* older;
  } header;
  void *allocate, *to_managed, *from_managed;
  // Returns 0, or sets a Python exception. The object owns shape and strides.
  int (*view)(void* object, nb::dlpack::dltensor* out);
};

// Returns the table of the type itself, or null. For a subclass it would describe the tensor beneath it
// (FakeTensor, DTensor).
inline const ExchangeApi* exchange_api(PyTypeObject* type) {
  PyObject* const capsule =
      type->tp_dict ? PyDict_GetItemString(type->tp_dict, "__dlpack_c_exchange_api__") : nullptr;
  if (!capsule || !PyCapsule_IsValid(capsule, "dlpack_exchange_api")) return nullptr;
  const auto* const api =
      static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  return api->header.major == 1 && api->view ? api : nullptr;
}

}  // namespace unisono::python
