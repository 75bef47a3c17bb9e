#include "arguments.hpp"

#include <nanobind/stl/vector.h>

#include "unisono/error.hpp"

namespace unisono::python {
namespace {

constexpr std::size_t kMostElements = static_cast<std::size_t>(PTRDIFF_MAX) / 16;

// Returns 'name' with NULs as escapes: an error's text would end at one.
std::string in_quotes(std::string_view name) {
  std::string text(1, '\'');
  for (const char c : name) c == '\0' ? text += "\\0" : text += c;
  return text += '\'';
}

// Runs `read`. Returns false if the Python object has another type than `read` expects.
template <class Read>
bool could(const Read& read) {
  try {
    read();
    return true;
  } catch (const std::bad_cast&) { return false; } catch (const nb::python_error&) {
    return false;
  }
}

// Returns a Python number. Throws nb::python_error or std::bad_cast if it is no integer from 0.
std::size_t whole(nb::handle number) {
  if (PyLong_CheckExact(number.ptr())) return nb::cast<std::size_t>(number);
  const nb::object index = nb::steal(PyNumber_Index(number.ptr()));
  if (!index.is_valid()) throw nb::python_error();
  return nb::cast<std::size_t>(index);
}

}  // namespace

Op read_op(std::string_view name) {
  if (const auto op = from_name<Op>(name, kOps)) return *op;
  throw UsageError("there is no op " + in_quotes(name) +
                   ": use sum, prod, min, max, avg, band, bor or bxor.");
}

Wire read_wire(const std::optional<std::string>& name) {
  if (!name) return Wire::exact;
  if (const auto wire = from_name<Wire>(*name, kWires); wire && *wire != Wire::exact) return *wire;
  throw UsageError("there is no wire " + in_quotes(*name) + ": use fp8 or int8, or leave it out.");
}

DType dtype_named(std::string_view name) {
  if (const auto dtype = from_name<DType>(name, kDTypes)) return *dtype;
  throw UsageError("there is no dtype " + in_quotes(name) + ".");
}

Collective read_collective(std::string_view name) {
  if (const auto collective = from_name<Collective>(name, kCollectives)) return *collective;
  std::string known;
  for (int c = 0; c < kCollectives; ++c)
    known += (c ? ", " : "") + std::string(name_of(static_cast<Collective>(c)));
  throw UsageError("there is no collective " + in_quotes(name) + ": use one of " + known + ".");
}

ChannelPolicy read_policy(std::string_view name) {
  if (const auto policy = from_name<ChannelPolicy>(name, kChannelPolicies)) return *policy;
  throw UsageError("there is no channel policy " + in_quotes(name) + ": use single, multi or round-robin.");
}

Memory read_device(std::string_view name) {
  if (name == "cpu") return Memory::host;
  if (name == "cuda") return Memory::device;
  throw UsageError("device=" + in_quotes(name) + " is unknown: use cpu or cuda.");
}

Level read_level(std::string_view name) {
  return name == "nodes" ? Level::nodes : level_of(read_device(name));
}

std::size_t read_size(const char* what, long long number) {
  if (number >= 0) return static_cast<std::size_t>(number);
  throw UsageError(std::string(what) + "=" + std::to_string(number) + " cannot be: give a number from 0.");
}

Shape read_shape(nb::handle shape) {
  Shape extents;
  const bool read = could([&] {
    if (PyIndex_Check(shape.ptr())) extents = {whole(shape)};
    else
      for (const nb::handle one : nb::list(nb::borrow(shape))) extents.push_back(nb::cast<std::size_t>(one));
  });
  if (read) return extents;
  throw UsageError(std::string(nb::repr(shape).c_str()) +
                   " is not a shape: pass a number of elements from 0, or a tuple of them.");
}

Counts::Counts(const Array& x, nb::handle sent, nb::handle got) {
  auto read = [](const char* what, nb::handle counts, std::vector<std::size_t>& to) {
    std::size_t total = 0;
    const bool read = could([&] {
      // a list or tuple is read in place
      const nb::object all = nb::steal(PySequence_Fast(counts.ptr(), "no numbers"));
      if (!all.is_valid()) throw nb::python_error();
      to.reserve(static_cast<std::size_t>(PySequence_Fast_GET_SIZE(all.ptr())));
      // a number of another type than int may change the list while it is read
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(all.ptr()); ++i) {
        to.push_back(whole(nb::borrow(PySequence_Fast_GET_ITEM(all.ptr(), i))));
        if (__builtin_add_overflow(total, to.back(), &total) || total > kMostElements)
          throw UsageError(std::string("the ") + what +
                           " counts add up to more than memory can hold: check them.");
      }
    });
    if (read) return total;
    throw UsageError(std::string("the ") + what + " counts " + nb::repr(counts).c_str() +
                     " are no numbers of elements: give a whole one from 0 for each rank.");
  };
  const std::size_t total = read("send", sent, sends);
  received = read("receive", got, receives);
  if (x.shape != Shape{total})
    throw UsageError("x has shape " + text(x.shape) + ", but the send counts add up to " +
                     std::to_string(total) + ": pass a 1-D x of that many.");
}

int read_rank(const char* what, const RankNumber& rank, int size) {
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(rank.number.ptr(), &overflow);
  if (overflow != 0 || number != static_cast<int>(number))
    throw UsageError(std::string(what) + " " + nb::str(rank.number).c_str() +
                     " is not a rank: there are ranks 0 to " + std::to_string(size - 1) + ".");
  return static_cast<int>(number);
}

std::vector<PlanEntry> read_plan(const PlanRows& rows) {
  std::vector<PlanEntry> read;
  for (const auto& one : rows)
    std::visit(
        [&](const auto& row) {
          const auto& [collective, symmetric, up_to, algorithm] =
              std::tie(std::get<0>(row), std::get<1>(row), std::get<2>(row), std::get<3>(row));
          read.push_back({read_collective(collective), symmetric,
                          up_to.value_or(static_cast<std::size_t>(-1)), algorithm});
          if constexpr (std::tuple_size_v<std::decay_t<decltype(row)>> == 5)
            std::tie(read.back().blocks, read.back().threads, read.back().piece_bytes) = std::get<4>(row);
        },
        one);
  return read;
}

}  // namespace unisono::python
