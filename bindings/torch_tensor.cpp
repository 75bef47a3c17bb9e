// Array's readers of torch tensors: a table of C functions, or the tensor's attributes.
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <utility>

#include "array.hpp"
#include "dtypes.hpp"
#include "exchange_api.hpp"
#include "objects.hpp"
#include "unisono/error.hpp"

namespace unisono::python {
namespace {

// torch.Tensor and its table of functions. Null before the first tensor has come, and if torch has no table.
struct TorchTable {
  PyTypeObject* type = nullptr;
  const ExchangeApi* api = nullptr;
  void learn(PyTypeObject* met) {
    if (type) return;
    api = exchange_api(met);
    if (!api) return;
    Py_INCREF(met);
    type = met;
  }
  void forget() { Py_XDECREF(std::exchange(type, nullptr)); }
} torch_table;

DtypeCache torch_dtypes;

// torch's function that returns the current stream of a GPU. Null before the first tensor there has come.
PyObject* current_stream = nullptr;

// Returns whether a tensor may have the negative bit, by its place in memory. torch sets the bit on the
// imaginary part of a conjugate (z.conj().imag). That part begins an odd number of elements into its memory.
// Its neighbours in every dimension are two elements apart, so a contiguous one has a single element.
bool may_be_negated(const void* data, std::size_t element, std::size_t count) {
  return count == 1 || reinterpret_cast<std::uintptr_t>(data) / element % 2 == 1;
}

}  // namespace

void forget_torch() {
  torch_dtypes.forget();
  torch_table.forget();
  Py_CLEAR(current_stream);
}

// Reads tensors of the type that from_torch has met first. Returns false if the tensor is not contiguous, of
// an unknown dtype, on another device, or negated: from_torch then says what is wrong.
bool Array::from_torch_table(nb::handle array) {
  if (Py_TYPE(array.ptr()) != torch_table.type) return false;
  nb::dlpack::dltensor tensor;
  if (torch_table.api->view(array.ptr(), &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  const bool on_gpu = tensor.device.device_type == nb::device::cuda::value;
  const auto known = find_dtype(tensor.dtype);
  const auto dims = static_cast<std::size_t>(tensor.ndim);
  if (!known || (!on_gpu && tensor.device.device_type != nb::device::cpu::value) ||
      !contiguous(dims, tensor.shape, tensor.strides))
    return false;
  library_ = Library::torch;
  memory = on_gpu ? Memory::device : Memory::host;
  device = tensor.device.device_id;
  dtype = *known;
  data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  count = shape.assign(tensor.shape, dims);
  if (may_be_negated(data, size_of(dtype), count) && nb::cast<bool>(call_method(array, names().is_neg)))
    return false;
  return true;
}

void Array::from_torch(nb::handle array, const char* what, bool written) {
  library_ = Library::torch;
  torch_table.learn(Py_TYPE(array.ptr()));
  if (nb::cast<bool>(get(array, names().is_cuda))) {
    memory = Memory::device;
    device = nb::cast<int>(call_method(array, names().get_device));
  } else if (!nb::cast<bool>(get(array, names().is_cpu))) {
    throw UsageError(std::string(what) + " is on device " +
                     nb::cast<std::string>(array.attr("device").attr("type")) +
                     ": pass a tensor on the CPU or a CUDA device.");
  }
  dtype = torch_dtypes.learn(get(array, names().dtype), what);
  if (!nb::cast<bool>(call_method(array, names().is_contiguous))) refuse_gaps(what, "tensor.contiguous()");
  // each element of such a tensor stands for its negative, which the memory does not show
  if (has(array, names().is_neg) && nb::cast<bool>(call_method(array, names().is_neg)))
    throw UsageError(std::string(what) + " has torch's negative bit set: pass " +
                     (written ? "another tensor." : std::string(what) + ".resolve_neg()."));
  data = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(call_method(array, names().data_ptr)));
  const nb::object extents = get(array, names().shape);
  for (nb::handle extent : extents) {
    shape.push_back(nb::cast<std::size_t>(extent));
    count *= shape.back();
  }
}

nb::object current_torch_stream(int device) {
  if (!current_stream)
    current_stream = nb::object(nb::module_::import_("torch").attr("_C").attr("_cuda_getCurrentRawStream"))
                         .release()
                         .ptr();
  return nb::handle(current_stream)(device);
}

}  // namespace unisono::python
