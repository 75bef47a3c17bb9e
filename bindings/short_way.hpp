// A short way into a method that nanobind has defined, for calls whose arguments cost more than their work.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

namespace unisono::python {

namespace nb = nanobind;

template <auto method>
class ShortWay;

// nanobind reads arguments by tables that hold for any function. Here the compiler knows the parameters. A
// call that is not plainly right (an argument too few, an unknown keyword, another type) goes to nanobind's
// own function, which also knows parameters that the method has not, and words the errors.
template <class Class, class Result, class... Arguments, Result (Class::*method)(Arguments...)>
class ShortWay<method> {
 public:
  // Puts it before a function of nanobind's, whose signature and docstring stay. parameters: the function's
  // first, one for each of the method's.
  template <class... Parameters>
  static void open(nb::handle function, const Parameters&... parameters) {
    static_assert(sizeof...(Parameters) == kCount);
    parameters_ = {Parameter{PyUnicode_InternFromString(parameters.name_), default_of(parameters)}...};
    if (!raise_) raise_ = nb::object(nb::cpp_function([] { throw; })).release().ptr();
    auto& entry = *reinterpret_cast<vectorcallfunc*>(reinterpret_cast<char*>(function.ptr()) +
                                                     Py_TYPE(function.ptr())->tp_vectorcall_offset);
    long_way_ = std::exchange(entry, &enter);
  }

 private:
  static constexpr std::size_t kCount = sizeof...(Arguments);
  struct Parameter {
    PyObject *name, *usual;  // usual: the default; null: there is none
  };
  using Found = std::array<PyObject*, kCount>;

  template <class P>
  static PyObject* default_of(const P& parameter) {
    if constexpr (requires { parameter.value; }) return parameter.value.inc_ref().ptr();
    else return nullptr;
  }

  // Finds the argument of each parameter. Returns false if that takes more than a look.
  static bool find(PyObject* const* arguments, std::size_t places, PyObject* names, Found& found) {
    if (places > kCount) return false;
    found.fill(nullptr);
    std::copy_n(arguments, places, found.begin());
    const Py_ssize_t named = names ? PyTuple_GET_SIZE(names) : 0;
    for (Py_ssize_t i = 0; i < named; ++i) {
      const auto at = std::ranges::find(parameters_, PyTuple_GET_ITEM(names, i), &Parameter::name);
      if (at == parameters_.end()) return false;
      PyObject*& one = found[static_cast<std::size_t>(at - parameters_.begin())];
      if (one) return false;
      one = arguments[places + static_cast<std::size_t>(i)];
    }
    for (std::size_t i = 0; i < kCount; ++i) {
      if (!found[i]) found[i] = parameters_[i].usual;
      if (!found[i] || (found[i] == Py_None && parameters_[i].usual != Py_None)) return false;
    }
    return true;
  }

  static PyObject* enter(PyObject* function, PyObject* const* arguments, std::size_t flags,
                         PyObject* names) noexcept {
    const auto places = static_cast<std::size_t>(PyVectorcall_NARGS(flags));
    Found found;
    if (places > 0 && find(arguments + 1, places - 1, names, found)) {
      nb::detail::make_caster<Class> self;
      std::tuple<nb::detail::make_caster<Arguments>...> read;
      const auto fit = [&]<std::size_t... I>(std::index_sequence<I...>) {
        return self.from_python(arguments[0], 0, nullptr) && self.template can_cast<Class&>() &&
               (std::get<I>(read).from_python(
                    found[I], static_cast<std::uint8_t>(nb::detail::cast_flags::convert), nullptr) &&
                ...);
      };
      constexpr auto all = std::make_index_sequence<kCount>();
      if (fit(all)) {
        try {
          return run(self.operator Class&(), read, all);
        } catch (...) { return PyObject_CallNoArgs(raise_); }
      }
    }
    return long_way_(function, arguments, flags, names);
  }

  template <class Read, std::size_t... I>
  static PyObject* run(Class& self, Read& read, std::index_sequence<I...>) {
    if constexpr (std::is_void_v<Result>) {
      (self.*method)(std::get<I>(read).operator nb::detail::cast_t<Arguments>()...);
      return nb::none().release().ptr();
    } else
      return (self.*method)(std::get<I>(read).operator nb::detail::cast_t<Arguments>()...).release().ptr();
  }

  static inline std::array<Parameter, kCount> parameters_;
  static inline vectorcallfunc long_way_ = nullptr;  // nanobind's
  static inline PyObject* raise_ = nullptr;          // raises, as nanobind does, what is being handled
};

}  // namespace unisono::python
