#include "core/request.hpp"

#include <algorithm>
#include <limits>

#include "base/deadline.hpp"

namespace unisono {
namespace {

bool combines(Collective collective) { return traits_of(collective).combines; }
bool rooted(Collective collective) { return traits_of(collective).rooted(); }
bool by_parts(Collective collective) { return traits_of(collective).by_parts(); }

// So that two sizes can be added.
constexpr std::size_t kMostBytes = std::numeric_limits<std::size_t>::max() / 4;

[[noreturn]] void too_many(std::size_t count) {
  throw UsageError("a count of " + std::to_string(count) +
                   " elements is more than memory can hold: check the counts.");
}

std::size_t bytes_of(const Call& call, std::size_t times) {
  std::size_t bytes;
  if (__builtin_mul_overflow(call.count, size_of(call.dtype) * times, &bytes) || bytes > kMostBytes)
    too_many(call.count);
  return bytes;
}

[[noreturn]] void refuse_missing(Collective collective, const char* which) {
  throw UsageError(std::string(name_of(collective)) + " needs " + which + " buffer on this rank.");
}

[[noreturn]] void refuse_overlap(Collective collective) {
  throw UsageError(
      "the input and the output of " + std::string(name_of(collective)) +
      " overlap without being in place (equal, or this rank's own block of the larger one): pass buffers "
      "that are in place or apart.");
}

[[noreturn]] void refuse_peer(std::string_view what, int peer, int rank, int ranks) {
  if (peer < 0 || peer >= ranks)
    throw UsageError(std::string(what) + " " + std::to_string(peer) +
                     " is not a rank: there are ranks 0 to " + std::to_string(ranks - 1) + ".");
  throw UsageError("rank " + std::to_string(rank) +
                   " cannot send to itself alone: use send_recv, which copies.");
}

void check_peer(std::string_view what, int peer, int rank, int ranks, bool self) {
  if (peer < 0 || peer >= ranks || (!self && peer == rank)) refuse_peer(what, peer, rank, ranks);
}

}  // namespace

Request::Request(Collective what, const Call& c, int me, int n)
    : collective(what), call(&c), rank(me), ranks(n) {
  const CollectiveTraits& traits = traits_of(what);
  if (traits.rooted()) check_peer("root", c.root, me, n, true);
  if (traits.combines) check_op(c.dtype, c.op, c.memory);
  args.block = bytes_of(c, 1);
  args.bytes = traits.by_blocks() ? bytes_of(c, static_cast<std::size_t>(n)) : args.block;
  args.in = static_cast<const byte*>(c.in);
  args.out = static_cast<byte*>(c.out);
  args.root = c.root;
  in_bytes = side_bytes(traits.in, me);
  out_bytes = side_bytes(traits.out, me);
  // in place, the smaller buffer is this rank's block of the larger one
  const std::size_t mine = args.block * static_cast<std::size_t>(me);
  const bool to_blocks = traits.out.extent == Extent::blocks, of_blocks = traits.in.extent == Extent::blocks;
  const std::size_t at_in = to_blocks && !of_blocks ? mine : 0, at_out = of_blocks && !to_blocks ? mine : 0;
  check_buffers(at_in, at_out);
}

Request::Request(const Call& c, int me, int n, std::span<const std::size_t> sent,
                 std::span<const std::size_t> received)
    : collective(Collective::all_to_all_v), call(&c), rank(me), ranks(n) {
  for (const auto& [kind, given] : {std::pair("send", sent.size()), std::pair("receive", received.size())})
    if (given != static_cast<std::size_t>(n))
      throw UsageError("all_to_all_v needs " + std::to_string(n) + " " + kind +
                       " counts, one for each rank, not " + std::to_string(given) + ".");
  auto parts = [&](byte* at, std::span<const std::size_t> counts, std::vector<Args::Part>& to) {
    const std::size_t element = size_of(c.dtype);
    std::size_t total = 0;
    to.reserve(counts.size());
    for (const std::size_t count : counts) {
      if (count > kMostBytes / element) too_many(count);
      to.push_back({at ? at + total : nullptr, count * element});
      total += to.back().bytes;
      if (total > kMostBytes) too_many(count);
    }
    return total;
  };
  const auto own = static_cast<std::size_t>(me);
  if (sent[own] != received[own])
    throw UsageError("all_to_all_v: rank " + std::to_string(me) + " sends itself " +
                     std::to_string(sent[own]) + " elements, but receives " + std::to_string(received[own]) +
                     " from itself: give both the same count.");
  args.in = static_cast<const byte*>(c.in);
  args.out = static_cast<byte*>(c.out);
  in_bytes = parts(const_cast<byte*>(args.in), sent, sends);
  out_bytes = parts(args.out, received, receives);
  args.bytes = std::max(in_bytes, out_bytes);
  args.sends = sends.data();
  args.receives = receives.data();
  if (in_place() && in_bytes > 0 && out_bytes > 0 && !std::equal(sent.begin(), sent.end(), received.begin()))
    throw UsageError("all_to_all_v in place needs the same send and receive counts: give it another output.");
  check_buffers(0, 0);
}

Request::Request(Collective what, const Call& c, int me, int n, int to, int from)
    : collective(what), call(&c), rank(me), ranks(n) {
  const bool both = what == Collective::send_recv;
  if (what != Collective::recv) check_peer("destination", to, me, n, both);
  if (what != Collective::send) check_peer("source", from, me, n, both);
  if (both && (to == me) != (from == me))
    throw UsageError("send_recv with itself needs this rank as both destination and source.");
  args.bytes = bytes_of(c, 1);
  args.in = static_cast<const byte*>(c.in);
  args.out = static_cast<byte*>(c.out);
  in_bytes = what == Collective::recv ? 0 : args.bytes;
  out_bytes = what == Collective::send ? 0 : args.bytes;
  check_buffers(0, 0);
}

Request::Request(const Call& c, int me, int n, std::span<const Communicator::Outgoing> outgoing,
                 std::span<const Communicator::Incoming> incoming)
    : collective(Collective::batch_send_recv), call(&c), rank(me), ranks(n) {
  sends.resize(static_cast<std::size_t>(n));
  receives.resize(static_cast<std::size_t>(n));
  auto add = [&](std::vector<Args::Part>& parts, const char* what, int peer, const void* data,
                 std::size_t bytes) {
    check_peer(what, peer, me, n, true);
    Args::Part& part = parts[static_cast<std::size_t>(peer)];
    if (part.at)
      throw UsageError(std::string("batch_send_recv has two messages with ") + what + " " +
                       std::to_string(peer) + ": give each peer one, or call it again.");
    if (!data) throw UsageError("batch_send_recv needs a buffer for each message.");
    if (bytes > kMostBytes) too_many(bytes);
    part = {static_cast<byte*>(const_cast<void*>(data)), bytes};
    args.bytes = std::max(args.bytes, bytes);
  };
  for (const auto& message : outgoing) add(sends, "destination", message.to, message.data, message.bytes);
  for (const auto& message : incoming) add(receives, "source", message.from, message.data, message.bytes);
  const auto own = static_cast<std::size_t>(me);
  if (!sends[own].at != !receives[own].at || sends[own].bytes != receives[own].bytes)
    throw UsageError("batch_send_recv: rank " + std::to_string(me) + " sends itself " +
                     std::to_string(sends[own].bytes) + " bytes, but receives " +
                     std::to_string(receives[own].bytes) + " from itself: give both ends the same.");
  check_apart();
  args.in = sends[own].at;  // of a rank alone, which copies
  args.out = receives[own].at;
  args.sends = sends.data();
  args.receives = receives.data();
}

Message::Message(Collective collective, const Call& call, int ranks, int with, int number)
    : sends(collective == Collective::send),
      at(sends ? static_cast<byte*>(const_cast<void*>(call.in)) : static_cast<byte*>(call.out)),
      bytes(bytes_of(call, 1)),
      dtype(call.dtype),
      peer(with),
      tag(number),
      timeout_s(call.timeout_s) {
  if (!sends && collective != Collective::recv)
    throw UsageError(std::string(name_of(collective)) + " has no tag: send and recv have.");
  if (tag < 0) throw UsageError("tag=" + std::to_string(tag) + " is none: give one from 0 to 2147483647.");
  if (sends || peer != Communicator::kAnySource)
    check_peer(sends ? "destination" : "source", peer, -1, ranks, true);
  if (bytes > 0 && !at)
    throw UsageError(std::string(what()) + " needs " + (sends ? "an input" : "an output") +
                     " buffer on this rank.");
  if (!call.algorithm.empty())
    throw UsageError("a message with a tag has no algorithms: leave algorithm out.");
  if (call.factor != 1) throw UsageError("a message with a tag has no sum: leave factor out.");
  if (call.memory == Memory::device)
    throw UsageError("a message with a tag is on host memory: copy it there, or leave the tag out.");
  check_timeout(call);
}

void refuse_op(DType dtype, Op op) {
  const std::string name(name_of(op));
  if (!has_op(dtype, op))
    throw UsageError(name + " is for integers (i8, u8, i32, i64), not " + std::string(name_of(dtype)) +
                     ": give an array of them, or another op.");
  throw UsageError(name + " is for host memory: copy the array there, or give another op.");
}

void check_timeout(const Call& call) {
  if (call.timeout_s == 0) return;
  check_timeout_s(call.timeout_s);
  if (call.memory == Memory::device)
    throw UsageError("a call on device memory has the communicator's deadline: leave timeout_s out.");
}

// Throws UsageError if a receive would overwrite another buffer of the call.
void Request::check_apart() const {
  auto overlap = [](const Args::Part& a, const Args::Part& b) {
    return b.bytes > 0 && a.at < b.at + b.bytes && b.at < a.at + a.bytes;
  };
  for (std::size_t p = 0; p < receives.size(); ++p)
    for (std::size_t q = 0; receives[p].bytes > 0 && q < receives.size(); ++q)
      if (overlap(receives[p], sends[q]) || (p < q && overlap(receives[p], receives[q])))
        throw UsageError(
            "a buffer that batch_send_recv receives into overlaps another of its buffers: pass buffers that "
            "are apart.");
}

// There are two algorithms that quantise, of which GPUs alone have the second.
void Request::check_wire() {
  if (call->wire == Wire::exact) return;
  const std::string name(name_of(call->wire));
  if (collective != Collective::all_reduce)
    throw UsageError(std::string(name_of(collective)) +
                     " cannot quantise: only all_reduce takes wire=" + name + ".");
  if (call->dtype != DType::f32 && call->dtype != DType::f16 && call->dtype != DType::bf16)
    throw UsageError("wire=" + name + " is for f32, f16 and bf16, not " + std::string(name_of(call->dtype)) +
                     ": leave it out.");
  if (call->op != Op::sum && call->op != Op::avg)
    throw UsageError("wire=" + name + " is for sum and avg, not " + std::string(name_of(call->op)) +
                     ": leave it out.");
  if (algorithm == Algorithm::automatic) algorithm = Algorithm::two_shot;
  if (form_of(algorithm) != Algorithm::two_shot || is_packets(algorithm) || is_direct(algorithm))
    throw UsageError("wire=" + name + " runs by two_shot, on GPUs by two_shot_ll128 too, not by " +
                     std::string(name_of(algorithm)) + ": leave algorithm out.");
}

void Request::check_scaling() const {
  const std::string name(name_of(collective));
  if (!combines(collective))
    throw UsageError(name + " has no sum: leave factor out, or scale the array before the call.");
  if (takes_factor(call->dtype, call->op, call->memory)) return;
  if (call->op != Op::sum)
    throw UsageError("factor is for sum, not " + std::string(name_of(call->op)) +
                     ": leave it out, or give op sum.");
  if (call->memory == Memory::device)
    throw UsageError("factor is for host memory: leave it out, and scale the array on the GPU before " +
                     name + ".");
  throw UsageError("factor is for f32, f64, f16 and bf16, not " + std::string(name_of(call->dtype)) +
                   ": leave it out, or give an array of those.");
}

void Request::name_algorithm(const std::vector<Algorithm>& known) {
  for (const Algorithm one : known)
    if (name_of(one) == call->algorithm) {
      algorithm = one;
      return;
    }
  std::string names;
  for (const Algorithm one : known)
    names += (names.empty() ? "use one of " : ", ") + std::string(name_of(one));
  throw UsageError(std::string(name_of(collective)) + " has no algorithm '" + std::string(call->algorithm) +
                   "' here: " + (names.empty() ? "leave it out" : names) + ".");
}

// A GPU loads no element from elsewhere.
void Request::check_alignment() const {
  if (!combines(collective)) return;
  const auto all = reinterpret_cast<std::uintptr_t>(args.in) | reinterpret_cast<std::uintptr_t>(args.out);
  if (const std::size_t size = size_of(call->dtype); all % size != 0)
    throw UsageError(std::string(name_of(collective)) + " of " + std::string(name_of(call->dtype)) +
                     " on a GPU needs buffers at multiples of " + std::to_string(size) +
                     " bytes: pass an array that is aligned.");
}

void Request::check_buffers(std::size_t at_in, std::size_t at_out) const {
  if (in_bytes > 0 && !args.in) refuse_missing(collective, "an input");
  if (out_bytes > 0 && !args.out) refuse_missing(collective, "an output");
  if (call->memory == Memory::device) check_alignment();
  if (in_bytes == 0 || out_bytes == 0) return;
  const bool apart = args.in + in_bytes <= args.out || args.out + out_bytes <= args.in;
  if (!apart && args.in + at_out != args.out + at_in) refuse_overlap(collective);
}

std::size_t Request::side_bytes(const Side& side, int owner) const {
  if (side.root_only && owner != args.root) return 0;
  return side.extent == Extent::blocks ? args.bytes : args.block;
}

Reached Request::reached_by_peers(int owner) const {
  const CollectiveTraits& traits = traits_of(collective);
  return {traits.loads.in ? side_bytes(traits.in, owner) : 0,
          traits.loads.out ? side_bytes(traits.out, owner) : 0};
}

std::uint32_t Request::mark(std::size_t length) const {
  auto bits = [](auto value, int at) { return static_cast<std::uint64_t>(value) << at; };
  std::uint64_t what = bits(planned_as(collective), 0) | bits(call->dtype, 8) | bits(algorithm, 16);
  if (combines(collective)) what |= bits(call->op, 24) | bits(call->wire, 28);
  if (rooted(collective)) what |= bits(call->root, 32);
  // a product spreads bits upwards only: what is mixed down after one is spread by the next
  std::uint64_t mixed = what * 0x9E3779B97F4A7C15 ^ length * 0xBF58476D1CE4E5B9;
  mixed = (mixed ^ mixed >> 32) * 0x94D049BB133111EB;
  return static_cast<std::uint32_t>(mixed >> 40) | 1;
}

Ticket Ticket::of(Collective collective, std::uint64_t count, const Call& call) {
  Ticket ticket{};
  ticket.collective = collective;
  ticket.dtype = call.dtype;
  ticket.op = call.op;
  ticket.wire = call.wire;
  ticket.memory = call.memory;
  ticket.root = static_cast<std::uint16_t>(call.root);
  ticket.count = count;
  return ticket;
}

Ticket Ticket::of(const Request& request) {
  Ticket ticket = of(request.collective, request.call->count, *request.call);
  ticket.algorithm = request.algorithm;
  return ticket;
}

bool Ticket::matches(const Ticket& other) const {
  if (collective != other.collective || dtype != other.dtype || algorithm != other.algorithm ||
      memory != other.memory)
    return false;
  if (combines(collective) && (op != other.op || wire != other.wire)) return false;
  if (rooted(collective) && root != other.root) return false;
  return by_parts(collective) || count == other.count;
}

std::string Ticket::text() const {
  // it comes from another rank, whose packet may have been meant for another kind of call
  if (static_cast<int>(collective) >= kCollectives || static_cast<int>(dtype) >= kDTypes ||
      static_cast<int>(op) >= kOps || static_cast<int>(wire) >= kWires ||
      static_cast<int>(algorithm) >= kAlgorithms)
    return "something else";
  std::string text(name_of(collective));
  if (collective == Collective::barrier || collective == Collective::register_memory) return text;
  if (collective == Collective::end_registration) return text + " of registration " + std::to_string(count);
  if (combines(collective)) text += "(" + std::string(name_of(op)) + ")";
  text += " of " + std::to_string(count) +
          (collective == Collective::empty ? " bytes" : " " + std::string(name_of(dtype)));
  if (wire != Wire::exact) text += " as " + std::string(name_of(wire));
  if (rooted(collective)) text += " with root " + std::to_string(root);
  if (memory == Memory::device) text += " on the GPU";
  if (algorithm != Algorithm::automatic) text += " by " + std::string(name_of(algorithm));
  return text;
}

}  // namespace unisono
