// The channel of the programs on the fabric lane: pieces in a ring of chunks in the receiver's memory, as
// ChunkChannel, whose face it has. A piece is written straight from the caller's buffer where that stays as
// it is.
#pragma once

#include "fabric/endpoint.hpp"

namespace unisono {

class RingChannel {
 public:
  explicit RingChannel(FabricEndpoint& at) : lane(at) {}
  FabricEndpoint& lane;

  std::size_t capacity() const { return lane.chunk_bytes(); }

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
  void wait_for_room(int peer) {
    const std::uint64_t given = lane.pieces_given(peer);
    if (given >= 2 * kHalf) lane.wait_for_credit(peer, (given - 2 * kHalf) / kHalf + 1);
  }
};

}  // namespace unisono
