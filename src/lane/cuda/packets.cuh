// Moves of which some operands are packets: what a peer sends is combined as it comes in, and what goes to a
// peer goes out with its flag, without a stop in memory.
#pragma once

#include <cstdint>

#include "lane/cuda/layout.hpp"
#include "lane/cuda/memory.cuh"
#include "lane/cuda/move.cuh"
#include "lane/cuda/wait.cuh"

namespace unisono::cuda {

// An operand of packets: a peer, and the number of the first one in the ring of the two. It travels as an
// address that no memory has, so that programs handle it like any other; it cannot be offset.
struct Stream {
  static constexpr std::uint64_t kMark = std::uint64_t{1} << 63;
  static constexpr int kPeerAt = 56;

  __device__ static byte* operand(int peer, std::uint64_t first) {
    return reinterpret_cast<byte*>(kMark | static_cast<std::uint64_t>(peer) << kPeerAt | first);
  }
  __device__ static bool is(const byte* at) { return static_cast<std::int64_t>(address(at)) < 0; }
  __device__ explicit Stream(const byte* at)
      : peer(static_cast<int>(address(at) >> kPeerAt & 0x7f)),
        first(address(at) & ((std::uint64_t{1} << kPeerAt) - 1)) {}
  int peer;
  std::uint64_t first;

 private:
  __device__ static std::uint64_t address(const byte* at) { return reinterpret_cast<std::uint64_t>(at); }
};

// The rings of a block: from it in its peers' memory, and to it in its rank's.
struct Rings {
  const Context& context;

  __device__ Packet* to(const Stream& stream, std::uint32_t i) const {
    return ring(stream.peer, context.rank) + (stream.first + i) % kPackets;
  }
  __device__ Packet* from(const Stream& stream, std::uint32_t i) const {
    return ring(context.rank, stream.peer) + (stream.first + i) % kPackets;
  }
  __device__ static std::uint32_t lap(const Stream& stream, std::uint32_t i) {
    return static_cast<std::uint32_t>((stream.first + i) / kPackets + 1);
  }

 private:
  __device__ Packet* ring(int owner, int writer) const {
    const std::size_t pair = static_cast<std::size_t>(blockIdx.x) * context.layout.ranks + writer;
    return reinterpret_cast<Packet*>(context.bases[owner] + context.layout.packets) + pair * kPackets;
  }
};

__device__ inline std::uint32_t packets_of(std::size_t bytes) {
  return static_cast<std::uint32_t>((bytes + kPacketBytes - 1) / kPacketBytes);
}

__device__ inline bool is_whole(const byte* at) {
  return reinterpret_cast<std::uintptr_t>(at) % kPacketBytes == 0;
}

// Writes 8 bytes of a result to every destination.
__device__ inline void scatter_word(const Rings& rings, const Dst* dsts, int n_dsts, std::uint32_t i,
                                    std::size_t bytes, std::uint64_t data) {
  for (int d = 0; d < n_dsts; ++d) {
    byte* at = dsts[d].at;
    if (Stream::is(at)) {
      const Stream stream(at);
      const std::uint64_t lap = static_cast<std::uint64_t>(Rings::lap(stream, i)) << 32;
      store_packet(rings.to(stream, i), {lap | (data & 0xffffffffu), lap | data >> 32});
    } else {
      store_some(at, i * kPacketBytes, bytes, is_whole(at), data);
    }
  }
}

// Takes 8 bytes of at most kSources sources, all of them in flight at once. False when a wait has failed.
template <int kSources>
__device__ bool gather_words(const Rings& rings, const byte* const* srcs, int n_srcs, std::uint32_t i,
                             std::size_t bytes, std::uint64_t (&words)[kSources]) {
  Packet got[kSources];
#pragma unroll
  for (int s = 0; s < kSources; ++s) {
    if (s >= n_srcs) break;
    if (Stream::is(srcs[s])) got[s] = load_packet(rings.from(Stream(srcs[s]), i));
    else words[s] = load_some(srcs[s], i * kPacketBytes, bytes, is_whole(srcs[s]));
  }
#pragma unroll
  for (int s = 0; s < kSources; ++s) {
    if (s >= n_srcs) break;
    if (!Stream::is(srcs[s])) continue;
    const Stream stream(srcs[s]);
    const std::uint32_t lap = Rings::lap(stream, i);
    if (!complete(got[s], lap))
      got[s] = await(rings.from(stream, i), lap, {rings.context, stream.peer, Slot::packet_credit});
    if (!complete(got[s], lap)) return false;
    words[s] = (got[s].low & 0xffffffffu) | got[s].high << 32;
  }
  return true;
}

// One source. False when a wait has failed, as below.
__device__ __noinline__ inline bool copy_packets(const Rings& rings, const Dst* dsts, int n_dsts,
                                                 const byte* src, std::size_t bytes) {
  for (std::uint32_t i = threadIdx.x; i < packets_of(bytes); i += blockDim.x) {
    std::uint64_t words[1];
    if (!gather_words(rings, &src, 1, i, bytes, words)) return false;
    scatter_word(rings, dsts, n_dsts, i, bytes, words[0]);
  }
  return true;
}

template <class T, Op op, int kSources>
__device__ bool combine_packets(const Rings& rings, const Dst* dsts, int n_dsts, const byte* const* srcs,
                                int n_srcs, std::size_t bytes) {
  constexpr std::size_t kCount = kPacketBytes / sizeof(T);
  using P = Pack<T, kCount>;
  for (std::uint32_t i = threadIdx.x; i < packets_of(bytes); i += blockDim.x) {
    std::uint64_t words[kSources];
    if (!gather_words(rings, srcs, n_srcs, i, bytes, words)) return false;
    P result;
#pragma unroll
    for (std::size_t e = 0; e < kCount; ++e) {
      auto wide = Wide<T>::from(std::bit_cast<P>(words[0]).elements[e]);
#pragma unroll
      for (int s = 1; s < kSources; ++s)
        if (s < n_srcs)
          wide = unisono::combine<op, T>(wide, Wide<T>::from(std::bit_cast<P>(words[s]).elements[e]));
      result.elements[e] = Wide<T>::to(finish<op, T>(wide, n_srcs));
    }
    scatter_word(rings, dsts, n_dsts, i, bytes, std::bit_cast<std::uint64_t>(result));
  }
  return true;
}

template <class T, Op op>
__device__ bool reduce_packets(const Rings& rings, const Dst* dsts, int n_dsts, const byte* const* srcs,
                               int n_srcs, std::size_t bytes) {
  if (n_srcs <= 2) return combine_packets<T, op, 2>(rings, dsts, n_dsts, srcs, n_srcs, bytes);
  if (n_srcs <= 4) return combine_packets<T, op, 4>(rings, dsts, n_dsts, srcs, n_srcs, bytes);
  return combine_packets<T, op, kMaxRanks>(rings, dsts, n_dsts, srcs, n_srcs, bytes);
}

using ReducePackets = bool (*)(const Rings& rings, const Dst* dsts, int n_dsts, const byte* const* srcs,
                               int n_srcs, std::size_t bytes);

}  // namespace unisono::cuda
