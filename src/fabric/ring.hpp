// The channel of programs on the fabric lane: pieces in a ring of chunks in the receiver's memory, with the
// functions of ChunkChannel. A piece is written straight from the caller's buffer if that stays as it is.
#pragma once

#include <chrono>

#include "fabric/endpoint.hpp"

namespace unisono {

class RingChannel {
 public:
  explicit RingChannel(FabricEndpoint& at) : lane(at) {}
  FabricEndpoint& lane;

  std::size_t capacity() const { return lane.chunk_bytes(); }
  // Returns how many pieces the peer has certainly taken: it tells of them by halves of the ring.
  std::uint64_t released(int peer) const { return lane.credits(peer) * kHalf; }
  // Returns whether there is room for a piece, so that `reserve` does not wait.
  bool has_room(int peer) const { return lane.pieces_given(peer) < released(peer) + 2 * kHalf; }

  Dst reserve(int peer, std::size_t) {
    wait_for_room(peer);
    return {lane.outbox(peer, lane.pieces_given(peer))};
  }
  void commit(int peer, std::size_t bytes) {
    lane.give_piece(peer, lane.outbox(peer, lane.pieces_given(peer)), bytes);
  }
  void put(int peer, const byte* src, std::size_t bytes) {
    if (lane.must_stage(src, bytes)) {
      const Dst to = reserve(peer, bytes);
      lane.move(&to, 1, &src, 1, bytes);
      commit(peer, bytes);
    } else {
      wait_for_room(peer);
      lane.give_piece(peer, src, bytes);
    }
  }

  // Waits until a piece comes from `src`, or until there is room for a piece to `dst`. If `patient`, the room
  // counts only after kSoon without a piece. Returns whether a piece comes.
  bool comes_before_room(int src, int dst, bool patient) {
    using Clock = std::chrono::steady_clock;
    const auto until = patient ? Clock::now() + kSoon : Clock::time_point{};
    lane.await(dst, [&] { return lane.piece_comes(src) || (has_room(dst) && Clock::now() > until); });
    return lane.piece_comes(src);
  }
  const byte* arrived(int peer, std::size_t bytes) { return lane.take_piece(peer, bytes); }
  void release(int peer) {
    if (lane.pieces_taken(peer) % kHalf == 0) lane.signal(peer, Slot::chunk_credit);
  }
  void take(int peer, Dst to, std::size_t bytes) {
    const byte* from = arrived(peer, bytes);
    lane.move(&to, 1, &from, 1, bytes);
    release(peer);
  }

 private:
  static constexpr std::uint64_t kHalf = FabricEndpoint::kChunks / 2;
  // Longer than a piece takes to come from a peer that sends and receives too.
  static constexpr std::chrono::milliseconds kSoon{1};
  void wait_for_room(int peer) {
    lane.await(peer, [&] { return has_room(peer); });
  }
};

}  // namespace unisono
