// A call as the core sees it: sizes in bytes, checked, and comparable with the other ranks' calls.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/plan.hpp"
#include "lane/lane.hpp"
#include "unisono/communicator.hpp"

namespace unisono {

// The bytes of a rank's input and output that direct programs reach from other ranks, on lanes that load.
struct Reached {
  std::size_t in = 0, out = 0;
};

struct Request {
  Collective collective;
  const Call* call;
  int rank, ranks;
  Algorithm algorithm = Algorithm::automatic;  // as asked for; then as chosen, which the ranks compare
  std::size_t in_bytes = 0, out_bytes = 0;     // of this rank's buffers; 0: it has none
  Args args;

  // Throws UsageError if the call is wrong by itself.
  Request(Collective collective, const Call& call, int rank, int ranks);
  Request(const Call& call, int rank, int ranks, std::span<const std::size_t> sends,
          std::span<const std::size_t> receives);
  Request(Collective collective, const Call& call, int rank, int ranks, int to, int from);
  Request(const Call& call, int rank, int ranks, std::span<const Communicator::Outgoing> sends,
          std::span<const Communicator::Incoming> receives);

  // Returns the bytes of the larger buffer of any rank, by which the plan chooses.
  std::size_t bytes() const { return args.bytes; }
  bool in_place() const { return args.in == args.out; }
  // Returns the bytes of this rank's output, or of its input if it has no output and may write to another
  // rank's. Where they are many, what it writes goes around the cache.
  std::size_t written_bytes() const { return out_bytes > 0 ? out_bytes : in_bytes; }

  // Takes the algorithm that the call names. Throws UsageError if `known` has none of that name.
  void name_algorithm(const std::vector<Algorithm>& known);
  // Throws UsageError for a quantised call that is wrong by itself, and names its algorithm.
  void check_wire();
  // Throws UsageError for a Call::factor that the call cannot have.
  void check_factor() const {
    if (call->factor != 1) check_scaling();
  }

  Reached reached_by_peers(int owner) const;

  // Returns a nonzero 24-bit hash of the fields that Ticket::matches compares. Two different calls collide
  // with probability 2^-24.
  std::uint32_t mark() const { return mark(call->count); }
  // Returns that of a message of so many bytes, of a call by parts.
  std::uint32_t mark(std::size_t length) const;

  // The parts of all_to_all_v and batch_send_recv, which args points to.
  std::vector<Args::Part> sends, receives;

  // Returns the same call with `of(part)` in place of each part; none if that leaves this rank without bytes.
  template <class Of>
  std::optional<Request> with_parts(const Of& of) const {
    Request some = *this;
    bool any = false;
    for (auto* parts : {&some.sends, &some.receives})
      for (Args::Part& part : *parts) {
        part = of(part);
        any = any || part.bytes > 0;
      }
    if (!any) return std::nullopt;
    some.args.sends = some.sends.data();
    some.args.receives = some.receives.data();
    return some;
  }

 private:
  // Returns the bytes of rank `owner`'s input or output.
  std::size_t side_bytes(const Side& side, int owner) const;
  // Throws UsageError if a buffer is missing, or if both overlap, except in place: the input begins `at_in`
  // bytes into the output, or the output `at_out` bytes into the input.
  void check_scaling() const;  // check_factor, of another factor than 1
  void check_buffers(std::size_t at_in, std::size_t at_out) const;
  void check_apart() const;
  void check_alignment() const;
};

// A message with a tag: a send or a receive.
struct Message {
  bool sends;
  std::byte* at;
  std::size_t bytes;
  DType dtype;
  int peer;  // a rank; of a receive also Communicator::kAnySource
  int tag;
  double timeout_s;  // 0: the communicator's

  // Throws UsageError if it is wrong by itself.
  Message(Collective collective, const Call& call, int ranks, int peer, int tag);
  std::string_view what() const { return sends ? "send" : "recv"; }
};

[[noreturn]] void refuse_op(DType dtype, Op op);  // of check_op
// Throws UsageError unless elements of that type, in that memory, are combined by that op.
inline void check_op(DType dtype, Op op, Memory memory) {
  if (!has_op(dtype, op, memory)) refuse_op(dtype, op);
}

// Throws UsageError for a Call::timeout_s that the call cannot have.
void check_timeout(const Call& call);

// The place of a buffer: `offset` bytes into a symmetric allocation, or at an address of its own process.
struct Place {
  static constexpr std::uint32_t kNone = 0, kAddress = ~std::uint32_t{0};
  std::uint32_t allocation = kNone;
  std::uint64_t offset = 0;
  bool operator==(const Place&) const = default;
  bool symmetric() const { return allocation != kNone && allocation != kAddress; }
};

// A rank's description of its call, which the ranks compare.
struct Ticket {
  Collective collective;
  DType dtype;
  Op op : 4;
  Wire wire : 4;
  Algorithm algorithm;
  bool in_place;
  Memory memory;
  std::uint16_t root;
  std::uint64_t count;
  Place in, out;       // of the buffers
  std::int64_t saves;  // nanoseconds that the kernel's copies save the rank (host/call_ways.hpp)

  // Returns a ticket without buffers and algorithm.
  static Ticket of(Collective collective, std::uint64_t count = 0, const Call& call = {});
  // Returns a request's ticket without buffers.
  static Ticket of(const Request& request);

  // Returns whether two calls are the same, except for their buffers.
  bool matches(const Ticket& other) const;
  // Returns the call in words: "all_reduce(sum) of 1024 f32".
  std::string text() const;
};

}  // namespace unisono
