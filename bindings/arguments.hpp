// Reads Python's arguments other than arrays into the core's types. A wrong one raises a UsageError that
// lists the choices.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <variant>
#include <vector>

#include "any_argument.hpp"
#include "array.hpp"
#include "unisono/tuning.hpp"

namespace unisono::python {

DType dtype_named(std::string_view name);
Op read_op(std::string_view name);
Wire read_wire(const std::optional<std::string>& name);  // None: exact
Collective read_collective(std::string_view name);
ChannelPolicy read_policy(std::string_view name);
Memory read_device(std::string_view name);  // cpu or cuda
Level read_level(std::string_view name);    // cpu, cuda or nodes

// Returns a number from 0. what: its name in the message. Throws UsageError for a negative one.
std::size_t read_size(const char* what, long long number);

// Returns the shape of a number, or of any iterable of numbers.
Shape read_shape(nb::handle shape);

// The counts of an all_to_all_v. Units: elements. Throws UsageError if x has another length than the send
// counts together, or if memory cannot hold so many.
struct Counts {
  Counts(const Array& x, nb::handle sends, nb::handle receives);
  std::vector<std::size_t> sends, receives;
  std::size_t received = 0;  // from all ranks
};

// Returns the number, which may be no rank of the communicator. what: the argument's name in the message.
// Throws UsageError if no int holds it.
int read_rank(const char* what, const RankNumber& rank, int size);

// Rows are (collective, symmetric, up_to_bytes or None, algorithm), and may have (blocks, threads,
// piece_bytes) at their end. The entries refer to the names in the rows.
using PlanRow = std::tuple<std::string, bool, std::optional<std::size_t>, std::string>;
using ShapedPlanRow =
    std::tuple<std::string, bool, std::optional<std::size_t>, std::string, std::tuple<int, int, std::size_t>>;
using PlanRows = std::vector<std::variant<PlanRow, ShapedPlanRow>>;
std::vector<PlanEntry> read_plan(const PlanRows& rows);

}  // namespace unisono::python
