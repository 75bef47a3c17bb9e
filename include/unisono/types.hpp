// Data types, reductions and collectives: the vocabulary that every layer shares.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace unisono {

enum class DType : std::uint8_t { f32, f64, f16, bf16, i8, u8, i32, i64, f8e4m3, f8e5m2 };
inline constexpr int kDTypes = 10;

// band, bor and bxor combine the bits of integers, in host memory.
enum class Op : std::uint8_t { sum, prod, min, max, avg, band, bor, bxor };
inline constexpr int kOps = 8;

// How elements travel in an all_reduce: as they are, or as a byte each with a scale for each block of 32. The
// byte is an 8-bit float (e4m3) or an integer.
enum class Wire : std::uint8_t { exact, fp8, int8 };
inline constexpr int kWires = 3;

// Where an array lies: in the host's memory, or in that of the communicator's GPU.
enum class Memory : std::uint8_t { host, device };

// How transfers to peers use the channels of the fabric lane. single: all take the first. multi: each is
// split over all. round_robin: each takes one, number (peer + rank) mod channels.
enum class ChannelPolicy : std::uint8_t { single, multi, round_robin };
inline constexpr int kChannelPolicies = 3;

// Whose algorithms a plan has: of calls on host memory, of calls on a GPU's, or of how nodes work together.
enum class Level : std::uint8_t { host, device, nodes };
constexpr Level level_of(Memory memory) { return memory == Memory::device ? Level::device : Level::host; }

// unisono.h has the numbers of these enumerations, up to the barrier's. New values follow those.
enum class Collective : std::uint8_t {
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  gather,
  reduce_scatter,
  scatter,
  all_to_all,
  all_to_all_v,
  send,
  recv,
  send_recv,
  batch_send_recv,
  barrier,
  empty,                // the collective allocation of symmetric memory
  register_memory,      // of the user's
  end_registration,     // Registration::close
  all_reduce_rms_norm,  // fused.hpp; all_reduce_layer_norm goes by its plan
};
inline constexpr int kCollectives = static_cast<int>(Collective::all_reduce_rms_norm) + 1;

constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64: return 8;
    case DType::f32:
    case DType::i32: return 4;
    case DType::f16:
    case DType::bf16: return 2;
    default: return 1;
  }
}

constexpr bool is_integer(DType dtype) {
  return dtype == DType::i8 || dtype == DType::u8 || dtype == DType::i32 || dtype == DType::i64;
}
constexpr bool is_bitwise(Op op) { return op == Op::band || op == Op::bor || op == Op::bxor; }

// Returns whether elements of that type, in that memory, are combined by that op.
constexpr bool has_op(DType dtype, Op op, Memory memory = Memory::host) {
  return !is_bitwise(op) || (is_integer(dtype) && memory == Memory::host);
}

// Returns whether a call of that op on such elements takes a factor (Call::factor).
constexpr bool takes_factor(DType dtype, Op op, Memory memory = Memory::host) {
  const bool is_float =
      dtype == DType::f32 || dtype == DType::f64 || dtype == DType::f16 || dtype == DType::bf16;
  return is_float && op == Op::sum && memory == Memory::host;
}

constexpr std::string_view name_of(DType dtype) {
  constexpr std::string_view names[kDTypes] = {"f32", "f64", "f16", "bf16",   "i8",
                                               "u8",  "i32", "i64", "f8e4m3", "f8e5m2"};
  return names[static_cast<int>(dtype)];
}

constexpr std::string_view name_of(Op op) {
  constexpr std::string_view names[kOps] = {"sum", "prod", "min", "max", "avg", "band", "bor", "bxor"};
  return names[static_cast<int>(op)];
}

constexpr std::string_view name_of(Wire wire) {
  constexpr std::string_view names[kWires] = {"exact", "fp8", "int8"};
  return names[static_cast<int>(wire)];
}

constexpr std::string_view name_of(ChannelPolicy policy) {
  constexpr std::string_view names[kChannelPolicies] = {"single", "multi", "round-robin"};
  return names[static_cast<int>(policy)];
}

namespace detail {
inline constexpr std::string_view kCollectiveNames[kCollectives] = {"all_reduce",
                                                                    "reduce",
                                                                    "broadcast",
                                                                    "all_gather",
                                                                    "gather",
                                                                    "reduce_scatter",
                                                                    "scatter",
                                                                    "all_to_all",
                                                                    "all_to_all_v",
                                                                    "send",
                                                                    "recv",
                                                                    "send_recv",
                                                                    "batch_send_recv",
                                                                    "barrier",
                                                                    "empty",
                                                                    "register",
                                                                    "Registration.close",
                                                                    "all_reduce_rms_norm"};
}  // namespace detail
// Every call asks for its name: a table within the function would be built each time.
constexpr std::string_view name_of(Collective collective) {
  return detail::kCollectiveNames[static_cast<int>(collective)];
}

// Returns the value of an enumeration whose name is `name`, if there is one. values: how many it has.
template <class E>
constexpr std::optional<E> from_name(std::string_view name, int values) {
  for (int i = 0; i < values; ++i)
    if (name_of(static_cast<E>(i)) == name) return static_cast<E>(i);
  return std::nullopt;
}

}  // namespace unisono
