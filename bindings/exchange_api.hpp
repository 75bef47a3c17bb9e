// DLPack's table of C functions, which torch.Tensor has (`__dlpack_c_exchange_api__`, DLPack 1.3): what a
// tensor is, without a call of Python for each property.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>

namespace unisono::python {

namespace nb = nanobind;

// Its begin: what follows is not used.
struct ExchangeApi {
  struct {
    std::uint32_t major, minor;
    void* older;
  } header;
  void *allocate, *to_managed, *from_managed;
  // 0, or an exception of Python's is set; shape and strides lie with the object.
  int (*view)(void* object, nb::dlpack::dltensor* out);
};

// That of the type itself, or null: in a subclass it would give what lies beneath (FakeTensor, DTensor).
inline const ExchangeApi* exchange_api(PyTypeObject* type) {
  PyObject* const capsule =
      type->tp_dict ? PyDict_GetItemString(type->tp_dict, "__dlpack_c_exchange_api__") : nullptr;
  if (!capsule || !PyCapsule_IsValid(capsule, "dlpack_exchange_api")) return nullptr;
  const auto* const api =
      static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  return api->header.major == 1 && api->view ? api : nullptr;
}

}  // namespace unisono::python
