// Channels: one-way streams of pieces between two ranks, with room for a few pieces. They take any pointer.
//
// Both channels have the same functions, so that one program serves both:
//   capacity()          returns the most bytes of a piece
//   put(peer, src, n)   sends a piece; waits only while the peer's ring is full
//   take(peer, dst, n)  receives the next piece
//   reserve(peer, n), commit(peer, n)   put in two steps: the caller writes the piece where reserve says
//   arrived(peer, n), release(peer)  take in two steps: the caller reads the piece where arrived says
#pragma once

#include <type_traits>
#include <vector>

#include "lane/lane.hpp"

namespace unisono {

// Pieces in a ring of chunks in the receiver's memory, each announced by a signal. The receiver returns
// credit by half rings, so that a sender seldom waits for it.
template <class Lane>
class ChunkChannel {
 public:
  UNISONO_PROGRAM explicit ChunkChannel(Lane& at) : lane(at) {}
  Lane& lane;

  UNISONO_PROGRAM std::size_t capacity() const { return smaller(lane.chunk_bytes(), lane.piece_bytes()); }

  UNISONO_PROGRAM Dst reserve(int peer, std::size_t bytes) {
    while (lane.signalled(peer, Slot::chunk) - lane.awaited(peer, Slot::chunk_credit) * kHalf >= 2 * kHalf)
      lane.wait(peer, Slot::chunk_credit);
    return {lane.chunk_at(peer, lane.signalled(peer, Slot::chunk) % (2 * kHalf), bytes),
            lane.streams_chunk(peer, bytes)};
  }
  UNISONO_PROGRAM void commit(int peer, std::size_t) { lane.signal(peer, Slot::chunk); }

  // Returns how many pieces have room before any is taken, on lanes whose workers may wait long for a peer's.
  UNISONO_PROGRAM std::uint32_t ahead() const
    requires requires(Lane& at) { at.pieces_ahead(); }
  {
    return smaller(lane.pieces_ahead(), kHalf);
  }

  // Returns whether a piece comes from `src` soon. Only on lanes that can tell (`reached`).
  UNISONO_PROGRAM bool comes_before_room(int src, int, bool)
    requires requires(Lane& at) { at.reached(src, Slot::chunk); }
  {
    constexpr int kLooks = 16384;  // longer than a piece takes to come from a peer that sends and receives
    bool come = lane.reached(src, Slot::chunk);
    for (int looks = 0; !come && looks < kLooks; ++looks) come = lane.reached(src, Slot::chunk);
    return come;
  }
  UNISONO_PROGRAM const byte* arrived(int peer, std::size_t bytes) {
    lane.wait(peer, Slot::chunk);
    return lane.chunk_from(peer, (lane.awaited(peer, Slot::chunk) - 1) % (2 * kHalf), bytes);
  }
  UNISONO_PROGRAM void release(int peer) {
    if constexpr (requires { lane.chunk_released(peer); }) lane.chunk_released(peer);
    if (lane.awaited(peer, Slot::chunk) % kHalf == 0) lane.signal(peer, Slot::chunk_credit);
  }

  UNISONO_PROGRAM void put(int peer, const byte* src, std::size_t bytes) {
    const Dst to = reserve(peer, bytes);
    lane.move(&to, 1, &src, 1, bytes);
    commit(peer, bytes);
  }
  UNISONO_PROGRAM void take(int peer, Dst to, std::size_t bytes) {
    const byte* from = arrived(peer, bytes);
    lane.move(&to, 1, &from, 1, bytes);
    release(peer);
  }

 private:
  static constexpr std::uint32_t kHalf = Lane::kChunks / 2;
};

// Pieces in packets, whose flag travels in the same store as the data. A receiver waits only for a piece's
// last byte. Credit returns by quarters of the ring, and a piece has at most a quarter. Therefore three
// pieces always have room, as programs need that give before they take.
template <class Lane>
class PacketChannel {
 public:
  UNISONO_PROGRAM explicit PacketChannel(Lane& at) : lane(at) {}
  Lane& lane;

  UNISONO_PROGRAM std::size_t capacity() const {
    return smaller(kBatch * Lane::kPacketBytes / kAlign * kAlign, lane.piece_bytes());
  }

  UNISONO_PROGRAM void put(int peer, const byte* src, std::size_t bytes) {
    wait_for_room(peer, bytes);
    lane.put_packets(peer, src, bytes);
  }
  UNISONO_PROGRAM void take(int peer, Dst to, std::size_t bytes) {
    lane.take_packets(peer, to.at, bytes);
    release(peer);
  }

  UNISONO_PROGRAM Dst reserve(int peer, std::size_t bytes) {
    wait_for_room(peer, bytes);
    return lane.packets_to(peer, bytes);
  }
  UNISONO_PROGRAM void commit(int peer, std::size_t bytes) { lane.commit_packets(peer, bytes); }
  UNISONO_PROGRAM const byte* arrived(int peer, std::size_t bytes) { return lane.packets_from(peer, bytes); }
  UNISONO_PROGRAM void release(int peer) {
    const auto batches = static_cast<std::uint32_t>(lane.packets_taken(peer) / kBatch);
    while (lane.signalled(peer, Slot::packet_credit) != batches) lane.signal(peer, Slot::packet_credit);
  }

 private:
  static constexpr std::uint32_t kBatch = Lane::kPackets / 4;
  UNISONO_PROGRAM void wait_for_room(int peer, std::size_t bytes) {
    const std::uint32_t end = static_cast<std::uint32_t>(lane.packets_sent(peer)) + packets(bytes);
    while (static_cast<std::int32_t>(end - lane.awaited(peer, Slot::packet_credit) * kBatch -
                                     Lane::kPackets) > 0)
      lane.wait(peer, Slot::packet_credit);
  }
  UNISONO_PROGRAM static constexpr std::uint32_t packets(std::size_t bytes) {
    return static_cast<std::uint32_t>((bytes + Lane::kPacketBytes - 1) / Lane::kPacketBytes);
  }
};

// Returns the bytes of a piece of `bytes` that only go one way. On some lanes their reader copies a piece
// while their writer has the next.
template <class Channel>
UNISONO_PROGRAM std::size_t one_way(Channel& channel, std::size_t bytes) {
  if constexpr (requires { channel.lane.one_way(bytes); })
    return smaller(channel.capacity(), channel.lane.one_way(bytes));
  else return channel.capacity();
}

// Gives the pieces of each round and takes them, as many rounds ahead as the channel says.
template <class Channel, class Give, class Take>
UNISONO_PROGRAM void some_ahead(Channel& channel, Rounds rounds, const Give& give, const Take& take) {
  if constexpr (requires { channel.ahead(); }) {
    Rounds next = rounds;
    for (auto i = channel.ahead(); i > 0 && next.more(); --i, next.next()) give(next.range());
    for (; rounds.more(); rounds.next(), next.next()) {
      if (next.more()) give(next.range());
      take(rounds.range());
    }
  } else {
    for (; rounds.more(); rounds.next()) {
      give(rounds.range());
      take(rounds.range());
    }
  }
}

// Sends the same piece to every peer. A lane that multicasts reads the piece once.
template <class Channel>
UNISONO_PROGRAM void put_all(Channel& channel, const byte* src, std::size_t bytes) {
  auto& lane = channel.lane;
  const int n = lane.size();
  if constexpr (std::remove_reference_t<decltype(lane)>::kMulticasts) {
    auto dsts = lane.destinations();
    for (int i = 1; i < n; ++i) dsts[i - 1] = channel.reserve(peer_at(lane, i), bytes);
    lane.move(dsts, n - 1, &src, 1, bytes);
    for (int i = 1; i < n; ++i) channel.commit(peer_at(lane, i), bytes);
  } else {
    for (int i = 1; i < n; ++i) channel.put(peer_at(lane, i), src, bytes);
  }
}

// Returns everyone's `mine`, in rank order.
template <class Channel, class T>
std::vector<T> exchange(Channel& channel, const T& mine) {
  static_assert(std::is_trivially_copyable_v<T>);
  auto& lane = channel.lane;
  std::vector<T> all(static_cast<std::size_t>(lane.size()));
  all[static_cast<std::size_t>(lane.rank())] = mine;
  for (int i = 1; i < lane.size(); ++i)
    channel.put(peer_at(lane, i), reinterpret_cast<const byte*>(&mine), sizeof(T));
  for (int i = 1; i < lane.size(); ++i) {
    const int p = peer_at(lane, i);
    channel.take(p, {reinterpret_cast<byte*>(&all[static_cast<std::size_t>(p)])}, sizeof(T));
  }
  return all;
}

}  // namespace unisono
