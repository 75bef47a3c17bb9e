// Calls on host memory with a size for each pair of ranks: all_to_all_v and batch_send_recv.
#include <algorithm>

#include "base/env.hpp"
#include "core/comparison.hpp"
#include "host/backend.hpp"
#include "host/move.hpp"
#include "programs/all_to_all.hpp"

namespace unisono {

namespace {

// Exchanges messages. Each piece has the mark of its own message, so that a receiver notices another size.
template <class Channel>
void run_messages(Channel channel, const Args& some, const Request& request) {
  HostThread& lane = channel.lane;
  const auto mark = [&](const std::vector<Args::Part>& parts, int p) {
    lane.mark(request.mark(parts[static_cast<std::size_t>(p)].bytes));
  };
  all_to_all_rounds(
      channel, some,
      [&](int p, const byte* from, Range piece) {
        mark(request.sends, p);
        channel.put(p, from, piece.bytes);
      },
      [&](int p, byte* to, Range piece) {
        mark(request.receives, p);
        channel.take(p, {to, some.stream}, piece.bytes);
      });
}

// Returns the mark of an offer to move messages of those sizes. It has both: an end whose peer says another
// size of either must notice before it reaches for the peer's memory. No message of data has that mark.
std::uint32_t mark_of_offer(const Request& request, std::size_t sent, std::size_t received) {
  return request.mark((sent + 1) * 0xD6E8FEB86659FD93 + received);
}

// The way of a message of an all_to_all_v from buffer to buffer. Its sender writes if both ends may act: an
// input that was written since the last call lies in its cache.
struct Path {
  Path(const Place& in, const Place& out, std::size_t bytes)
      : written(bytes > 0 && out.allocation != Place::kNone && (out.symmetric() || !in.symmetric())),
        read(bytes > 0 && !written && in.allocation != Place::kNone),
        none(bytes > 0 && !written && !read),
        plain(bytes > 0 && !in.symmetric() && !out.symmetric()) {}
  bool written, read;  // by its sender; by its receiver
  bool none;           // it has none
  bool plain;          // neither buffer is symmetric memory
};

}  // namespace

// A message of an all_to_all_v is planned as if all of the call's were as large.
Algorithm LocalCommunicator::planned(const Request& request, const Args::Part& part) {
  const bool all = request.collective == Collective::all_to_all_v;
  const std::size_t bytes = all ? part.bytes * static_cast<std::size_t>(size()) : part.bytes;
  return host_plan().choose(request.collective, bytes, false);
}

// Both ends of a pair know both of its messages, and no other rank does. So each pair of an all_to_all_v goes
// by the larger one, and each message of a batch by itself: at once, or after the pair has met if the plan
// would have it direct. On every rank packets go first, and chunks last.
void LocalCommunicator::run_parts_on_host(Request& request) {
  if (check_) compare_parts(*this, packets(), request);
  Args& args = request.args;
  if (size() == 1) return host::copy(args.out, args.in, args.bytes);
  const bool all = request.collective == Collective::all_to_all_v;
  args.stream = (all ? request.written_bytes() : args.bytes) >= group_.stream_bytes();
  const HostThread::OwnWays own(group_.lane(), !env().stream_chunks);
  bool meets = false, chunks = false;
  for (int p = 0; p < size(); ++p) {
    const Args::Part& to = request.sends[static_cast<std::size_t>(p)];
    const Args::Part& from = request.receives[static_cast<std::size_t>(p)];
    Pair& pair = parts_[static_cast<std::size_t>(p)];
    pair.meets = false;
    if (all) plan_pair(request, p, pair);
    else pair.to = planned(request, to), pair.from = planned(request, from);
    meets = meets || pair.meets;
    chunks = chunks || !is_packets(pair.to) || !is_packets(pair.from);
  }
  // an empty message is a packet too, since its other end may say another size
  byte nothing{};
  const Args::Part empty{&nothing, all ? 1u : 0u};
  if (choose_parts(request, [&](int p, Algorithm by, const Args::Part& part) {
        if (part.bytes == 0 && !is_direct(by) && p != rank()) return empty;
        return is_packets(by) ? part : Args::Part{};
      }))
    run_messages(packets(), chosen_, request);
  const auto times = meets ? meet_pairs(request) : Times{};
  if (chunks && choose_parts(request, [](int, Algorithm by, const Args::Part& part) {
        return is_packets(by) || is_direct(by) ? Args::Part{} : part;
      }))
    run_messages(ChunkChannel<HostThread>(group_.lane()), chosen_, request);
  if (meets) end_pairs(request, times);
  group_.lane().mark(0);
}

// Sets chosen_ to the messages that of(peer, algorithm, part) gives. Returns whether there are any.
template <class Of>
bool LocalCommunicator::choose_parts(const Request& request, const Of& of) {
  const auto n = static_cast<std::size_t>(size());
  chosen_parts_.resize(2 * n);
  chosen_ = request.args;
  chosen_.sends = chosen_parts_.data();
  chosen_.receives = chosen_parts_.data() + n;
  bool any = false;
  for (std::size_t p = 0; p < n; ++p) {
    const int peer = static_cast<int>(p);
    const Args::Part to = of(peer, parts_[p].to, request.sends[p]);
    const Args::Part from = of(peer, parts_[p].from, request.receives[p]);
    chosen_parts_[p] = to, chosen_parts_[n + p] = from;
    any = any || to.bytes > 0 || from.bytes > 0;
  }
  return any;
}

// Plans the messages between this rank and another, alike on both.
void LocalCommunicator::plan_pair(const Request& request, int peer, Pair& pair) {
  const auto p = static_cast<std::size_t>(peer);
  const std::size_t bytes = std::max(request.sends[p].bytes, request.receives[p].bytes);
  const bool named = request.algorithm != Algorithm::automatic;
  const Algorithm plain = named ? request.algorithm : planned(request, {nullptr, bytes});
  pair.way = nullptr;
  bool meets = is_direct(plain) && (named || group_.reaches_all());
  if (meets && !named && peer != rank() && group_.learns_ways()) {
    pair.way = &pairs_[p].both(bytes);
    meets = !pair.way->held();
  } else if (!meets && !named && symmetric_->ever()) {
    meets = is_direct(host_plan().choose(request.collective, bytes * parts_.size(), true));
  }
  pair.meets = meets && peer != rank();
  pair.to = pair.from = pair.meets         ? Algorithm::direct
                        : is_direct(plain) ? Plan::staged(request.collective)
                                           : plain;
}

// Tells each peer that may be reached where the buffers of the pair lie, and moves what goes direct.
LocalCommunicator::Times LocalCommunicator::meet_pairs(const Request& request) {
  HostThread& lane = group_.lane();
  auto channel = packets();
  Times times{.began = Clock::now(), .met = {}};
  const bool named = request.algorithm != Algorithm::automatic;
  const bool in_place = request.in_place() && request.out_bytes > 0;
  bool refused =
      named && (in_place || (request.out_bytes > 0 && place(request.args.out, request.out_bytes) == Place{}));
  for_pairs(request, [&](int p, Pair& pair, const Args::Part& to, const Args::Part& from) {
    pair.mine = {.in = place(to.at, to.bytes), .out = place(from.at, from.bytes)};
    pair.mine.saves = pair.way ? pair.way->next() : 0;
    pair.mine.in_place = in_place;
    pair.mine.refused = refused;
    lane.mark(mark_of_offer(request, to.bytes, from.bytes));
    channel.put(p, reinterpret_cast<const byte*>(&pair.mine), sizeof pair.mine);
  });
  for_pairs(request, [&](int p, Pair& pair, const Args::Part& to, const Args::Part& from) {
    lane.mark(mark_of_offer(request, from.bytes, to.bytes));
    channel.take(p, {reinterpret_cast<byte*>(&pair.theirs)}, sizeof pair.theirs);
    refused = refused || pair.theirs.refused;
  });
  if (refused) refuse_direct(request.algorithm);
  times.met = Clock::now();
  lane.reach_far(!group_.one_process());
  for_pairs(request, [&](int p, Pair& pair, const Args::Part& to, const Args::Part& from) {
    const Offer &mine = pair.mine, &theirs = pair.theirs;
    const Path sent(mine.in, theirs.out, to.bytes), received(theirs.in, mine.out, from.bytes);
    const bool plain = sent.plain || received.plain;
    bool direct = !sent.none && !received.none && !mine.in_place && !theirs.in_place;
    pair.learns = pair.way && direct && plain;
    if (pair.way && !pair.learns) pair.way->leave_out();
    if (!named) {
      const std::size_t bytes = std::max(to.bytes, from.bytes) * parts_.size();
      direct = direct && is_direct(host_plan().choose(request.collective, bytes, !plain));
      if (plain) direct = direct && std::int64_t{mine.saves} + theirs.saves >= 0;
      if (pair.way) pair.way->hold(!plain, symmetric_->ever(), !direct);
    }
    if (!direct) {
      pair.to = pair.from = Plan::staged(request.collective);
      return;
    }
    if (received.read) {
      const byte* source = reach(theirs.in, p, from.bytes);
      const Dst target{from.at, request.args.stream};
      lane.move(&target, 1, &source, 1, from.bytes);
    }
    if (sent.written) {
      const Dst target{reach(theirs.out, p, to.bytes), request.args.stream};
      const byte* source = to.at;
      lane.move(&target, 1, &source, 1, to.bytes);
    }
    lane.signal(p, Slot::meet);
  });
  return times;
}

// Waits for the peers that move this rank's data, and learns. A pair's share of the time is that of its
// bytes.
void LocalCommunicator::end_pairs(const Request& request, const Times& times) {
  std::size_t all = 0;
  bool learns = false;
  for_pairs(request, [&](int p, Pair& pair, const Args::Part& to, const Args::Part& from) {
    if (is_direct(pair.to)) group_.lane().wait(p, Slot::meet);
    learns = learns || pair.learns;
    all += to.bytes + from.bytes;
  });
  if (!learns) return;
  const auto time = Clock::now() - times.met;
  for_pairs(request, [&](int, Pair& pair, const Args::Part& to, const Args::Part& from) {
    if (!pair.learns) return;
    const double share = static_cast<double>(to.bytes + from.bytes) / static_cast<double>(all);
    pair.way->took(!is_direct(pair.to), std::chrono::duration_cast<Clock::duration>(time * share),
                   times.met - times.began);
  });
}

// Calls body(peer, pair, part to it, part from it) for those that meet.
template <class Body>
void LocalCommunicator::for_pairs(const Request& request, const Body& body) {
  for (int i = 1; i < size(); ++i) {
    const int p = peer_at(group_.lane(), i);
    const auto at = static_cast<std::size_t>(p);
    if (parts_[at].meets) body(p, parts_[at], request.sends[at], request.receives[at]);
  }
}

}  // namespace unisono
