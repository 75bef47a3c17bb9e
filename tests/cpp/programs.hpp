// Makes a collective call and checks its output against a plain loop. Each rank knows the inputs of all.
#pragma once

#include <iterator>
#include <string>
#include <vector>

#include "ranks.hpp"
#include "reference.hpp"

namespace unisono::test {

struct Case {
  Collective collective = Collective::all_reduce;
  std::string_view algorithm{};
  std::size_t count = 1;
  DType dtype = DType::f32;
  Op op = Op::sum;
  int root = 0;
  bool in_place = false;
  std::uint64_t seed = 1;
  bool scaled = false;  // each rank's input has a factor of its own

  // Returns a rank's factor. 1: none.
  double factor(int rank) const {
    constexpr double kFactors[] = {0.1, 1, -2.5, 1.0 / 3, 3e-5, 0};
    return scaled ? kFactors[(seed + static_cast<std::uint64_t>(rank)) % std::size(kFactors)] : 1;
  }

  std::string text() const {
    return std::string(name_of(collective)) + " by " +
           (algorithm.empty() ? "the plan" : std::string(algorithm)) + " of " + std::to_string(count) + " " +
           std::string(name_of(dtype)) + ", " + std::string(name_of(op)) + ", root " + std::to_string(root) +
           (in_place ? ", in place" : "") + (scaled ? ", seed " + std::to_string(seed) + ", scaled" : "");
  }
};

inline bool sends_blocks(Collective c) {
  return c == Collective::reduce_scatter || c == Collective::scatter || c == Collective::all_to_all;
}
inline bool gets_blocks(Collective c) {
  return c == Collective::all_gather || c == Collective::gather || c == Collective::all_to_all;
}
inline bool combines(Collective c) {
  return c == Collective::all_reduce || c == Collective::reduce || c == Collective::reduce_scatter;
}
inline bool needs_input(Collective c, bool root) {
  return root || (c != Collective::broadcast && c != Collective::scatter);
}
inline bool gets_output(Collective c, bool root) {
  return root || (c != Collective::reduce && c != Collective::gather);
}

// Returns a rank's input: floats whose sum depends on the order, or any bits of other dtypes.
inline Bytes input_of(const Case& c, int rank, std::size_t count) {
  Bytes made(count * size_of(c.dtype) + 8);
  std::uint64_t state = (c.seed * 1000 + static_cast<std::uint64_t>(rank)) * 0x9e3779b97f4a7c15u;
  for (std::size_t i = 0; i + 8 < made.size() + 7; i += 8) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    std::uint64_t word = state ^ state >> 29;
    if (c.dtype == DType::f32) word = (word & 0x83ffffff83ffffffu) | 0x3c0000003c000000u;  // 2^-7 to 2
    if (i + 8 <= made.size()) put(made.data() + i, 0, word);
  }
  made.resize(count * size_of(c.dtype));
  return made;
}

inline Bytes expected_of(const Case& c, int me, int n) {
  const std::size_t block = c.count * size_of(c.dtype), own = static_cast<std::size_t>(me) * block;
  const std::size_t count = sends_blocks(c.collective) ? c.count * static_cast<std::size_t>(n) : c.count;
  if (c.collective == Collective::broadcast) return input_of(c, c.root, count);
  if (c.collective == Collective::scatter) {
    const Bytes all = input_of(c, c.root, count);
    return Bytes(all.data() + own, all.data() + own + block);
  }
  std::vector<Bytes> inputs;
  std::vector<const std::byte*> parts;
  for (int r = 0; r < n; ++r) {
    inputs.push_back(input_of(c, r, count));
    if (c.scaled) inputs.back() = scaled(c.dtype, inputs.back(), c.factor(r));
  }
  for (const Bytes& input : inputs) parts.push_back(input.data() + (sends_blocks(c.collective) ? own : 0));
  if (combines(c.collective)) return reduced(c.dtype, c.op, parts, c.count);
  Bytes out;
  for (const std::byte* part : parts) out.insert(out.end(), part, part + block);
  return out;
}

inline void run(Communicator& comm, const Call& call, Collective collective) {
  switch (collective) {
    case Collective::all_reduce: return comm.all_reduce(call);
    case Collective::reduce: return comm.reduce(call);
    case Collective::broadcast: return comm.broadcast(call);
    case Collective::all_gather: return comm.all_gather(call);
    case Collective::gather: return comm.gather(call);
    case Collective::reduce_scatter: return comm.reduce_scatter(call);
    case Collective::scatter: return comm.scatter(call);
    default: return comm.all_to_all(call);
  }
}

// Runs the case on this rank. room: memory for both buffers, at odd offsets. The bytes between and after the
// buffers must stay as they are.
inline void run_checked(Communicator& comm, const Case& c, std::byte* room, std::size_t room_bytes) {
  constexpr std::size_t guard = 16;
  constexpr std::byte untouched{0x5a};
  const int n = comm.size(), me = comm.rank();
  const auto ranks = static_cast<std::size_t>(n);
  const bool root = me == c.root;
  const std::size_t block = c.count * size_of(c.dtype), own = block * static_cast<std::size_t>(me);
  const bool has_in = needs_input(c.collective, root), has_out = gets_output(c.collective, root);
  const std::size_t in_bytes = sends_blocks(c.collective) ? block * ranks : block;
  const std::size_t out_bytes = gets_blocks(c.collective) ? block * ranks : block;
  const std::size_t used = guard + (c.seed % 3) + in_bytes + guard + out_bytes + guard;
  ASSERT_LE(used, room_bytes);
  std::fill_n(room, used, untouched);
  std::byte* in = room + guard + c.seed % 3;
  std::byte* out = in + in_bytes + guard;
  if (c.in_place && has_in && has_out) {
    if (in_bytes == out_bytes) out = in;
    else if (in_bytes > out_bytes) out = in + own;
    else in = out + own;
  } else if (c.in_place && !has_in && in_bytes == out_bytes) {
    in = out;  // on all ranks except the root of a broadcast
  }
  if (has_in) {
    const Bytes mine = input_of(c, me, in_bytes / size_of(c.dtype));
    std::copy(mine.begin(), mine.end(), in);
  }
  Bytes before(room, room + used);
  const bool passes_in = has_in || in == out;
  run(comm,
      {.in = passes_in ? in : nullptr,
       .out = has_out ? out : nullptr,
       .count = c.count,
       .dtype = c.dtype,
       .op = c.op,
       .root = c.root,
       .algorithm = c.algorithm,
       .factor = c.factor(me)},
      c.collective);
  if (has_out) {
    const Bytes expected = expected_of(c, me, n);
    const long at = first_difference(c.dtype, out, expected.data(), expected.size() / size_of(c.dtype));
    EXPECT_EQ(at, -1) << c.text() << ", rank " << me << " of " << n;
    std::copy_n(out, out_bytes, before.begin() + (out - room));
  }
  // a call changes nothing except its output, also in place
  EXPECT_EQ(std::memcmp(before.data(), room, used), 0)
      << c.text() << ": bytes beside the output of rank " << me << " of " << n;
}

// Makes one batch of messages of size_of(from, to) bytes between the ranks for which goes(from, to) is true.
template <class Goes, class SizeOf>
void run_checked_batch(Communicator& comm, const Goes& goes, const SizeOf& size_of) {
  const int me = comm.rank(), n = comm.size();
  auto message = [&](int from, int to) {
    Bytes bytes(size_of(from, to) + 1);  // the last one is not sent
    for (std::size_t i = 0; i < bytes.size(); ++i)
      bytes[i] = static_cast<std::byte>(from * 37 + to * 11 + static_cast<int>(i % 251));
    return bytes;
  };
  const auto count = static_cast<std::size_t>(n);
  std::vector<Bytes> sent(count), got(count);
  std::vector<Communicator::Outgoing> sends;
  std::vector<Communicator::Incoming> receives;
  for (int p = 0; p < n; ++p) {
    const auto at = static_cast<std::size_t>(p);
    sent[at] = message(me, p);
    got[at].resize(size_of(p, me) + 1);
    if (goes(me, p)) sends.push_back({sent[at].data(), sent[at].size() - 1, p});
    if (goes(p, me)) receives.push_back({got[at].data(), got[at].size() - 1, p});
  }
  comm.batch_send_recv({}, sends, receives);
  for (int p = 0; p < n; ++p) {
    const auto at = static_cast<std::size_t>(p);
    Bytes expected(got[at].size());
    if (goes(p, me)) expected = message(p, me);
    expected.back() = {};
    EXPECT_EQ(got[at], expected) << p << " to " << me;
  }
}

}  // namespace unisono::test
