#include "array.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <typeinfo>
#include <utility>

#include "exchange_api.hpp"
#include "unisono/error.hpp"

namespace unisono::python {
namespace {

struct Name {
  const char* numpy;  // torch's are the same
  DType dtype;
  std::uint8_t dlpack;  // DLDataTypeCode
};
constexpr Name kNames[] = {
    {"float32", DType::f32, 2},        {"float64", DType::f64, 2}, {"float16", DType::f16, 2},
    {"bfloat16", DType::bf16, 4},      {"int8", DType::i8, 0},     {"uint8", DType::u8, 1},
    {"int32", DType::i32, 0},          {"int64", DType::i64, 0},   {"float8_e4m3fn", DType::f8e4m3, 10},
    {"float8_e5m2", DType::f8e5m2, 12}};

nb::dlpack::dtype dlpack_of(DType dtype) {
  for (const Name& one : kNames)
    if (one.dtype == dtype) return {one.dlpack, static_cast<std::uint8_t>(8 * size_of(dtype)), 1};
  return {};
}

std::optional<DType> dtype_of(nb::dlpack::dtype type) {
  for (const Name& one : kNames)
    if (type == dlpack_of(one.dtype)) return one.dtype;
  return std::nullopt;
}

// Whether an array has its elements in C order without gaps. Strides count elements.
bool contiguous(std::size_t dims, const std::int64_t* extents, const std::int64_t* strides) {
  std::int64_t expected = 1;
  bool fits = true;
  for (std::size_t i = dims; i-- > 0; expected *= extents[i])
    fits = fits && (extents[i] == 1 || strides[i] == expected);
  return fits || expected == 0;
}

std::optional<DType> dtype_named(std::string_view name) {
  for (const Name& one : kNames)
    if (name == one.numpy) return one.dtype;
  return from_name<DType>(name, kDTypes);
}

[[noreturn]] void unknown(const std::string& name, const char* what) {
  throw UsageError(std::string(what) + " has elements of type " + name +
                   ": use f32, f64, f16, bf16, i8, u8, i32, i64, f8e4m3 or f8e5m2.");
}

std::optional<DType> dtype_of(const char* format, Py_ssize_t size) {
  if (!format || format[0] == '\0') return std::nullopt;
  const char* code = format[0] == '<' || format[0] == '=' || format[0] == '@' ? format + 1 : format;
  if (code[0] == '\0' || code[1] != '\0') return std::nullopt;
  switch (code[0]) {
    case 'f': return DType::f32;
    case 'd': return DType::f64;
    case 'e': return DType::f16;
    case 'b': return DType::i8;
    case 'B': return DType::u8;
    case 'i':
    case 'l':
    case 'q': return size == 4 ? DType::i32 : DType::i64;
    default: return std::nullopt;
  }
}

// What is asked of every tensor, by names made once: attr("...") makes a string each time.
struct TensorNames {
  static PyObject* made(const char* name) { return PyUnicode_InternFromString(name); }
  PyObject* const data_ptr = made("data_ptr");
  PyObject* const is_contiguous = made("is_contiguous");
  PyObject* const is_neg = made("is_neg");
  PyObject* const is_cuda = made("is_cuda");
  PyObject* const is_cpu = made("is_cpu");
  PyObject* const get_device = made("get_device");
  PyObject* const dtype = made("dtype");
  PyObject* const shape = made("shape");
  PyObject* const array_struct = made("__array_struct__");
};
const TensorNames& tensor() {
  static const TensorNames names;
  return names;
}
nb::object own(PyObject* value) {
  if (!value) throw nb::python_error();
  return nb::steal(value);
}
bool has(nb::handle object, PyObject* name) { return PyObject_HasAttr(object.ptr(), name) != 0; }
nb::object get(nb::handle object, PyObject* name) { return own(PyObject_GetAttr(object.ptr(), name)); }
nb::object ask(nb::handle object, PyObject* method) {
  return own(PyObject_CallMethodObjArgs(object.ptr(), method, nullptr));
}

[[noreturn]] void read_only(const char* what) {
  throw UsageError(std::string(what) + " is read-only: pass an array that may be written.");
}
// `copies`: its library's function that makes one.
[[noreturn]] void not_contiguous(const char* what, const char* copies) {
  throw UsageError(std::string(what) + " is not contiguous: pass a C-contiguous array (" + copies +
                   " copies).");
}

// Libraries have one object for each dtype; those met are kept, so that none takes another's place.
class Dtypes {
 public:
  std::optional<DType> find(const nb::object& its) const {
    for (const auto& [object, dtype] : met_)
      if (object == its.ptr()) return dtype;
    return std::nullopt;
  }
  // Its str may have a module in front.
  DType learn(const nb::object& its, const char* what) {
    if (const auto known = find(its)) return *known;
    // str of an object, not of an accessor: that would be a cast
    const std::string name = nb::cast<std::string>(nb::str(its));
    const auto known = dtype_named(std::string_view(name).substr(name.find('.') + 1));
    if (!known) unknown(name, what);
    if (met_.size() < std::size(kNames)) met_.emplace_back(its.inc_ref().ptr(), *known);
    return *known;
  }
  void forget() {
    for (const auto& [object, dtype] : std::exchange(met_, {})) Py_DECREF(object);
  }

 private:
  std::vector<std::pair<PyObject*, DType>> met_;
} torch_dtypes;

// numpy's arrays of types that its buffers cannot describe (ml_dtypes'): the type of those arrays, once one
// has come, and theirs.
struct Extensions {
  PyTypeObject* type = nullptr;
  Dtypes dtypes;
  std::optional<DType> find(nb::handle array) const {
    if (Py_TYPE(array.ptr()) != type) return std::nullopt;
    return dtypes.find(get(array, tensor().dtype));
  }
  DType learn(nb::handle array, const char* what) {
    const DType known = dtypes.learn(get(array, tensor().dtype), what);
    if (!type) Py_INCREF(type = Py_TYPE(array.ptr()));
    return known;
  }
  void forget() {
    Py_XDECREF(std::exchange(type, nullptr));
    dtypes.forget();
  }
} extensions;

// What numpy's __array_struct__ points to (NumPy reference, "The array interface protocol", version 3).
struct ArrayStruct {
  int two, dims;
  char kind;
  int item_bytes, flags;
  Py_ssize_t *extents, *strides;
  void* data;
  PyObject* description;
};
constexpr int kContiguous = 0x1, kWriteable = 0x400;

// torch.Tensor, and its table of functions: null before the first one has come, and of versions without.
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

// torch's function that gives the current stream of a GPU; null before the first tensor there has come.
PyObject* current_stream = nullptr;

// " (why)", in a library's own words.
std::string reason(const nb::python_error& error) { return " (" + readable(nb::str(error.value())) + ")"; }

// Why an array does not come by DLPack.
std::string refusal(nb::handle array) {
  try {
    array.attr("__dlpack__")();
  } catch (const nb::python_error& error) { return reason(error); }
  return {};
}

// Returns cupy, if the program has imported it. An array of cupy's is there only then.
nb::object cupy() { return nb::module_::import_("sys").attr("modules").attr("get")("cupy", nb::none()); }

// Whether a tensor may have the negative bit, of what DLPack's table tells. torch sets the bit on the
// imaginary part of a conjugate (z.conj().imag), which lies an odd number of elements into its memory, and
// whose neighbours in every dimension are two elements apart, so that a contiguous one has one element.
bool may_be_negated(const void* data, std::size_t element, std::size_t count) {
  return count == 1 || reinterpret_cast<std::uintptr_t>(data) / element % 2 == 1;
}

}  // namespace

void forget_libraries() {
  torch_dtypes.forget();
  extensions.forget();
  torch_table.forget();
  Py_CLEAR(current_stream);
}

std::string readable(nb::handle text) {
  const nb::object bytes = nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
  if (!bytes.is_valid()) throw nb::python_error();
  std::string read(PyBytes_AS_STRING(bytes.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(bytes.ptr())));
  for (std::size_t at = 0; (at = read.find('\0', at)) != std::string::npos;) read.replace(at, 1, "\\0");
  return read;
}

// By way of the other constructor, so that the destructor runs where this one throws.
Array::Array(nb::handle array, const char* what, bool written) : Array() {
  if (from_torch_table(array)) return;
  if (const auto known = extensions.find(array)) {
    from_extension_type(array, *known, what, written);
    return;
  }
  if (from_buffer(array, what, written)) return;
  std::string why;
  try {
    if (from_others(array, what, written)) return;
  } catch (const std::bad_cast&) {
    why = ", whose description of its memory is malformed";
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_Exception) || error.matches(PyExc_MemoryError)) throw;
    why = ", whose description of its memory is malformed" + reason(error);
  }
  const bool is_class = PyType_Check(array.ptr());
  throw UsageError(std::string(what) + (is_class ? " is the class " : " is a ") +
                   nb::type_name(is_class ? array : array.type()).c_str() + why +
                   ": pass a numpy or cupy array, or a torch tensor.");
}

bool Array::from_others(nb::handle array, const char* what, bool written) {
  if (PyType_Check(array.ptr())) return false;  // a class has its arrays' attributes, but no memory
  if (has(array, tensor().data_ptr) && has(array, tensor().is_contiguous)) from_torch(array, what, written);
  else if (nb::hasattr(array, "__cuda_array_interface__")) from_cuda(array, what, written);
  else if (has(array, tensor().array_struct))
    from_extension_type(array, extensions.learn(array, what), what, written);
  else if (nb::hasattr(array, "__dlpack__")) from_dlpack(array, what, written);
  else return false;
  return true;
}

Array::Array(Array&& other) noexcept
    : data(other.data),
      memory(other.memory),
      device(other.device),
      dtype(other.dtype),
      shape(std::move(other.shape)),
      count(other.count),
      library_(other.library_),
      dlpack_(std::move(other.dlpack_)),
      view_(other.view_),
      held_(other.held_) {
  other.held_ = false;
}

Array::~Array() {
  if (held_) PyBuffer_Release(&view_);
}

void Array::measure() {
  count = 1;
  for (const std::size_t extent : shape) count *= extent;
}

bool Array::from_buffer(nb::handle array, const char* what, bool written) {
  if (!PyObject_CheckBuffer(array.ptr())) return false;
  if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_FULL_RO) != 0) {  // numpy has no format for bf16 and fp8
    PyErr_Clear();
    return false;
  }
  held_ = true;
  const auto known = dtype_of(view_.format, view_.itemsize);
  if (!known)
    unknown(has(array, tensor().dtype) ? nb::cast<std::string>(nb::str(get(array, tensor().dtype)))
                                       : std::string("'") + (view_.format ? view_.format : "?") + "'",
            what);
  if (!PyBuffer_IsContiguous(&view_, 'C')) not_contiguous(what, "numpy.ascontiguousarray");
  if (written && view_.readonly) read_only(what);
  dtype = *known;
  data = view_.buf;
  shape.assign(view_.shape, view_.shape + view_.ndim);
  measure();
  return true;
}

void Array::from_extension_type(nb::handle array, DType known, const char* what, bool written) {
  const nb::object capsule = get(array, tensor().array_struct);
  const auto* its = static_cast<const ArrayStruct*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
  if (!its) throw nb::python_error();
  if (!(its->flags & kContiguous)) not_contiguous(what, "numpy.ascontiguousarray");
  if (written && !(its->flags & kWriteable)) read_only(what);
  dtype = known;
  data = its->data;
  shape.assign(its->extents, its->extents + its->dims);
  measure();
}

// Of a type that from_torch has met. False for what is not contiguous, of an unknown type, elsewhere or
// perhaps negated: of these from_torch has more to say.
bool Array::from_torch_table(nb::handle array) {
  if (Py_TYPE(array.ptr()) != torch_table.type) return false;
  nb::dlpack::dltensor its;
  if (torch_table.api->view(array.ptr(), &its) != 0) {
    PyErr_Clear();
    return false;
  }
  const bool on_gpu = its.device.device_type == nb::device::cuda::value;
  const auto known = dtype_of(its.dtype);
  const auto dims = static_cast<std::size_t>(its.ndim);
  if (!known || (!on_gpu && its.device.device_type != nb::device::cpu::value) ||
      !contiguous(dims, its.shape, its.strides))
    return false;
  library_ = Library::torch;
  memory = on_gpu ? Memory::device : Memory::host;
  device = its.device.device_id;
  dtype = *known;
  data = static_cast<std::byte*>(its.data) + its.byte_offset;
  shape.assign(its.shape, its.shape + dims);
  measure();
  if (may_be_negated(data, size_of(dtype), count) && nb::cast<bool>(ask(array, tensor().is_neg)))
    return false;
  return true;
}

void Array::from_torch(nb::handle array, const char* what, bool written) {
  library_ = Library::torch;
  torch_table.learn(Py_TYPE(array.ptr()));
  if (nb::cast<bool>(get(array, tensor().is_cuda))) {
    memory = Memory::device;
    device = nb::cast<int>(ask(array, tensor().get_device));
  } else if (!nb::cast<bool>(get(array, tensor().is_cpu))) {
    throw UsageError(std::string(what) + " is on device " +
                     nb::cast<std::string>(array.attr("device").attr("type")) +
                     ": pass a tensor on the CPU or a CUDA device.");
  }
  dtype = torch_dtypes.learn(get(array, tensor().dtype), what);
  if (!nb::cast<bool>(ask(array, tensor().is_contiguous))) not_contiguous(what, "tensor.contiguous()");
  // the bit says that each element stands for its negative, which the memory does not show
  if (has(array, tensor().is_neg) && nb::cast<bool>(ask(array, tensor().is_neg)))
    throw UsageError(std::string(what) + " has torch's negative bit set: pass " +
                     (written ? "another tensor." : std::string(what) + ".resolve_neg()."));
  data = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(ask(array, tensor().data_ptr)));
  const nb::object extents = get(array, tensor().shape);
  shape.reserve(nb::len(extents));
  for (nb::handle extent : extents) shape.push_back(nb::cast<std::size_t>(extent));
  measure();
}

// Cupy and others: the version 3 interface (a typestr of numpy's, no strides where it is C-contiguous).
void Array::from_cuda(nb::handle array, const char* what, bool written) {
  const nb::dict its = nb::cast<nb::dict>(array.attr("__cuda_array_interface__"));
  const std::string type = nb::cast<std::string>(nb::str(its["typestr"]));
  std::optional<DType> known;
  for (const auto& [name, one] :
       {std::pair("f4", DType::f32), std::pair("f8", DType::f64), std::pair("f2", DType::f16),
        std::pair("i1", DType::i8), std::pair("u1", DType::u8), std::pair("i4", DType::i32),
        std::pair("i8", DType::i64)})
    if (type.size() == 3 && type[0] != '>' && type.substr(1) == name) known = one;
  if (!known) unknown("'" + type + "'", what);
  const nb::tuple where = nb::cast<nb::tuple>(its["data"]);
  if (where.size() != 2) throw std::bad_cast();
  if (written && nb::cast<bool>(where[1])) read_only(what);
  shape = nb::cast<Shape>(nb::list(its["shape"]));
  dtype = *known;
  measure();
  if (its.contains("strides") && !its["strides"].is_none() && count > 0) {
    const auto strides = nb::cast<std::vector<std::int64_t>>(nb::list(its["strides"]));
    if (strides.size() != shape.size()) throw std::bad_cast();
    auto expected = static_cast<std::int64_t>(size_of(dtype));
    for (std::size_t i = shape.size(); i-- > 0; expected *= static_cast<std::int64_t>(shape[i]))
      if (shape[i] > 1 && strides[i] != expected) not_contiguous(what, "cupy.ascontiguousarray");
  }
  data = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(where[0]));
  memory = Memory::device;
  const bool numbered = nb::hasattr(array, "device") && nb::hasattr(array.attr("device"), "id");
  library_ = numbered && !cupy().is_none() ? Library::cupy : Library::other;
  device = numbered ? nb::cast<int>(array.attr("device").attr("id")) : -1;
}

void Array::from_dlpack(nb::handle array, const char* what, bool written) {
  nb::ndarray<nb::ro> view;
  if (!nb::try_cast(array, view))
    throw UsageError(std::string(what) + " cannot be taken by DLPack" + refusal(array) +
                     ": pass a C-contiguous numpy, torch or cupy array.");
  if (nb::ndarray<> writable; written && !nb::try_cast(array, writable)) read_only(what);
  const nb::dlpack::dtype type = view.dtype();
  const auto known = dtype_of(type);
  if (!known)
    unknown("DLPack code " + std::to_string(type.code) + " of " + std::to_string(type.bits) + " bits", what);
  if (!contiguous(view.ndim(), view.shape_ptr(), view.stride_ptr()))
    not_contiguous(what, "its library's ascontiguousarray");
  shape.assign(view.shape_ptr(), view.shape_ptr() + view.ndim());
  dtype = *known;
  measure();
  data = const_cast<void*>(static_cast<const void*>(view.data()));
  memory = view.device_type() == nb::device::cpu::value ? Memory::host : Memory::device;
  device = view.device_id();
  dlpack_ = nb::cast(view);
}

nb::object Array::stream(nb::handle asked) const {
  if (memory == Memory::host) {
    if (!asked.is_none()) throw UsageError("stream= is for arrays on a GPU: leave it out.");
    return nb::none();
  }
  if (!asked.is_none()) return nb::borrow(asked);
  if (library_ == Library::torch) {
    if (!current_stream)
      current_stream = nb::object(nb::module_::import_("torch").attr("_C").attr("_cuda_getCurrentRawStream"))
                           .release()
                           .ptr();
    return nb::handle(current_stream)(device);
  }
  if (library_ == Library::cupy) return cupy().attr("cuda").attr("get_current_stream")();
  return nb::none();
}

void* stream_handle(nb::handle stream) {
  if (stream.is_none()) return nullptr;
  if (PyLong_Check(stream.ptr())) return reinterpret_cast<void*>(nb::cast<std::uintptr_t>(stream));
  for (const char* name : {"cuda_stream", "ptr", "handle"})
    if (const nb::object its = nb::getattr(stream, name, nb::none()); !its.is_none())
      return reinterpret_cast<void*>(nb::cast<std::uintptr_t>(its));
  throw UsageError(std::string(nb::repr(stream).c_str()) +
                   " is not a stream: pass a torch or cupy stream, or the handle as a number.");
}

nb::object empty_like_on(nb::handle like, const Shape& shape, int device, nb::handle stream) {
  const bool torch = nb::hasattr(like, "new_empty");
  if (stream.is_none() || (!torch && (cupy().is_none() || !nb::hasattr(like, "__cuda_array_interface__"))))
    return empty_like(like, shape);
  const nb::object cuda =
      torch ? nb::object(nb::module_::import_("torch").attr("cuda")) : nb::object(cupy().attr("cuda"));
  const auto handle = reinterpret_cast<std::uintptr_t>(stream_handle(stream));
  // of an ExternalStream(0) torch makes a new stream
  const nb::object of_library = torch && handle == 0
                                    ? nb::object(cuda.attr("default_stream")(device))
                                    : nb::object(cuda.attr("ExternalStream")(handle, device));
  const nb::object within = torch ? nb::object(cuda.attr("stream")(of_library)) : of_library;
  within.attr("__enter__")();
  nb::object made;
  try {
    made = empty_like(like, shape);
  } catch (...) {
    within.attr("__exit__")(nb::none(), nb::none(), nb::none());
    throw;
  }
  within.attr("__exit__")(nb::none(), nb::none(), nb::none());
  return made;
}

nb::object empty_like(nb::handle like, const Shape& shape) {
  const nb::tuple extents = nb::tuple(nb::cast(shape));
  if (nb::hasattr(like, "new_empty")) return like.attr("new_empty")(extents);
  const bool on_gpu = nb::hasattr(like, "__cuda_array_interface__");
  if (on_gpu && nb::hasattr(like, "dtype"))
    if (const nb::object library = cupy(); !library.is_none())
      return library.attr("empty")(extents, like.attr("dtype"));
  if (on_gpu || !nb::hasattr(like, "dtype"))
    throw UsageError(std::string("x is a ") + nb::type_name(like.type()).c_str() +
                     ", of which no new array can be made: give out.");
  return nb::module_::import_("numpy").attr("empty")(extents, like.attr("dtype"));
}

const char* numpy_name(DType dtype) { return kNames[static_cast<int>(dtype)].numpy; }

nb::object numpy_dtype(DType dtype) {
  for (const Name& one : kNames) {
    if (one.dtype != dtype) continue;
    const bool extension = dtype == DType::bf16 || dtype == DType::f8e4m3 || dtype == DType::f8e5m2;
    const nb::module_ module = nb::module_::import_(extension ? "ml_dtypes" : "numpy");
    return nb::module_::import_("numpy").attr("dtype")(module.attr(one.numpy));
  }
  throw UsageError("there is no such dtype.");
}

DType read_dtype(nb::handle dtype) {
  std::string name;
  if (nb::isinstance<nb::str>(dtype)) name = readable(dtype);
  else if (nb::hasattr(dtype, "name") && nb::isinstance<nb::str>(dtype.attr("name")))
    name = readable(dtype.attr("name"));
  else if (PyType_Check(dtype.ptr())) name = readable(dtype.attr("__name__"));
  else name = readable(nb::str(dtype));
  if (const auto dot = name.find('.'); dot != std::string::npos) name = name.substr(dot + 1);
  const auto known = dtype_named(name);
  const bool native = !nb::hasattr(dtype, "isnative") || nb::cast<bool>(dtype.attr("isnative"));
  if (!known || !native) unknown(native ? name : "foreign byte order", "the buffer");
  return *known;
}

nb::object device_array(void* data, std::size_t bytes, int device, DType type, const Shape& extents,
                        const nb::capsule& owner) {
  const nb::object modules = nb::module_::import_("sys").attr("modules");
  const bool torch = nb::cast<bool>(modules.attr("__contains__")("torch"));
  if (!torch && !nb::cast<bool>(modules.attr("__contains__")("cupy")))
    return nb::cast(nb::ndarray<nb::array_api, nb::device::cuda>(data, extents.size(), extents.data(), owner,
                                                                 nullptr, dlpack_of(type),
                                                                 nb::device::cuda::value, device));
  // bytes: not every version of either takes each dtype
  const nb::ndarray<std::uint8_t, nb::device::cuda> flat(data, {bytes}, owner, {}, nb::dtype<std::uint8_t>(),
                                                         nb::device::cuda::value, device);
  const nb::module_ library = nb::module_::import_(torch ? "torch" : "cupy");
  const nb::object array = library.attr("from_dlpack")(nb::cast(flat));
  const nb::object dtype = torch ? nb::object(library.attr(numpy_name(type))) : numpy_dtype(type);
  return array.attr("view")(dtype).attr("reshape")(nb::tuple(nb::cast(extents)));
}

std::string text(const Shape& shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + (shape.size() == 1 ? ",)" : ")");
}

}  // namespace unisono::python
