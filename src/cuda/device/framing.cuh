// The framings of messages, in which data and flag travel in one store. A ring is an array of units of 16
// bytes, one for each thread.
#pragma once

#include "cuda/device/memory.cuh"
#include "cuda/layout.hpp"

namespace unisono::cuda {

// The payload of a unit.
template <int kCount>
struct Words {
  std::uint64_t at[kCount] = {};
};

// Load and store any number of bytes at any address; a number below 1 does nothing.
template <int kCount>
__device__ __noinline__ Words<kCount> load_bytes(const byte* src, int bytes) {
  Words<kCount> words;
#pragma unroll
  for (int b = 0; b < 8 * kCount; ++b)
    if (b < bytes) words.at[b / 8] |= static_cast<std::uint64_t>(src[b]) << (b % 8 * 8);
  return words;
}
template <int kCount>
__device__ __noinline__ void store_bytes(byte* dst, int bytes, Words<kCount> words) {
#pragma unroll
  for (int b = 0; b < 8 * kCount; ++b)
    if (b < bytes) dst[b] = static_cast<byte>(words.at[b / 8] >> (b % 8 * 8));
}
// Stores whole words to an address that is a multiple of sizeof(Part).
template <class Part, int kCount>
__device__ void store_parts(byte* dst, int words_there, const Words<kCount>& words) {
  constexpr int kParts = 8 / sizeof(Part);
#pragma unroll
  for (int i = 0; i < kCount * kParts; ++i)
    if (i / kParts < words_there)
      reinterpret_cast<Part*>(dst)[i] =
          static_cast<Part>(words.at[i / kParts] >> (i % kParts * 8 * sizeof(Part)));
}

// Half of every unit is its flag: the least latency, half the bandwidth (NCCL's LL, with 16-byte units).
struct Packets {
  static constexpr int kWords = 1;
  static constexpr bool kBulk = false;  // whether messages can be so long that the order of peers matters
  using Data = Words<kWords>;

  __device__ static unsigned offset(unsigned unit) { return unit * static_cast<unsigned>(kPacketBytes); }
  // Returns an offset into the piece: the unit travels if the message reaches beyond it.
  __device__ static unsigned head(unsigned unit) { return offset(unit); }

  __device__ static void put(bool there, Packet* to, std::uint32_t count, const Data& data) {
    const std::uint64_t flag = static_cast<std::uint64_t>(count) << 32;
    if (there) store_packet(to, {flag | (data.at[0] & 0xffffffffu), flag | data.at[0] >> 32});
  }
  __device__ static bool complete(const Packet& packet, std::uint32_t count) {
    return packet.low >> 32 == count && packet.high >> 32 == count;
  }
  __device__ static Data data(const Packet& packet) {
    return {{(packet.low & 0xffffffffu) | packet.high << 32}};
  }
  // Returns whether the unit of this thread has data word w.
  __device__ static bool has(int) { return true; }
  // Each thread decides for itself.
  __device__ static bool all(bool mine) { return mine; }
  __device__ static bool any(bool mine) { return mine; }
};

// Eight units are a line of 128 bytes: 120 of data, and the flag in the last word. Eight neighbours of a warp
// store or load it by one instruction. NVLink carries and memory serves that access as a whole, as NCCL's
// LL128 assumes too. A condition for a store or load is the same for the eight.
struct Lines {
  static constexpr int kWords = 2;
  static constexpr bool kBulk = true;
  using Data = Words<kWords>;

  __device__ static unsigned offset(unsigned unit) {
    return head(unit) + unit % kLineUnits * static_cast<unsigned>(sizeof(Packet));
  }
  __device__ static unsigned head(unsigned unit) {
    return unit / kLineUnits * static_cast<unsigned>(kLineBytes);
  }

  // Requires: every thread of the warp calls it, and `there` is the same for a line.
  __device__ static void put(bool there, Packet* to, std::uint32_t count, const Data& data) {
    const Packet packet{data.at[0], has(1) ? data.at[1] : count};
    __syncwarp();
    if (there) store_packet(to, packet);
  }
  __device__ static bool complete(const Packet& packet, std::uint32_t count) {
    return has(1) || packet.high == count;
  }
  __device__ static Data data(const Packet& packet) { return {{packet.low, packet.high}}; }
  __device__ static bool has(int w) { return w == 0 || threadIdx.x % kLineUnits != kLineUnits - 1; }
  __device__ static bool all(bool mine) { return __all_sync(0xffffffffu, mine); }
  __device__ static bool any(bool mine) { return __any_sync(0xffffffffu, mine); }
};

// Loads and stores the payload of a thread's unit, `at` bytes into a buffer of `bytes`.
// Requires: all buffers and sizes are whole words.
template <class Framing>
struct Whole : Framing {
  using typename Framing::Data;
  static constexpr bool kWhole = true;
  __device__ static Data load(const byte* src, unsigned at, unsigned bytes) {
    Data data;
#pragma unroll
    for (int w = 0; w < Framing::kWords; ++w)
      if (Framing::has(w) && at + 8 * w < bytes)
        data.at[w] = reinterpret_cast<const std::uint64_t*>(src + at)[w];
    return data;
  }
  __device__ static void store(byte* dst, unsigned at, unsigned bytes, const Data& data) {
#pragma unroll
    for (int w = 0; w < Framing::kWords; ++w)
      if (Framing::has(w) && at + 8 * w < bytes) reinterpret_cast<std::uint64_t*>(dst + at)[w] = data.at[w];
  }
};

// Does the same for buffers and sizes of any alignment. A unit is put together from the words that it lies
// in, except at the ends of the message, which those words may reach beyond.
template <class Framing>
struct Ragged : Framing {
  using typename Framing::Data;
  static constexpr bool kWhole = false;
  __device__ static int words() { return Framing::has(1) ? Framing::kWords : 1; }
  __device__ static int left(unsigned at, unsigned bytes) {
    const int all = static_cast<int>(bytes - at);
    return all < 8 * words() ? all : 8 * words();
  }
  __device__ static Data load(const byte* src, unsigned at, unsigned bytes) {
    const int mine = left(at, bytes);
    const auto past = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(src + at) % 8);
    const bool inside = past == 0 || (at >= past && at - past + 8 * words() + 8 <= bytes);
    if (mine < 8 * words() || !inside) return load_bytes<Framing::kWords>(src + at, mine);
    const auto* from = reinterpret_cast<const std::uint64_t*>(src + at - past);
    Data data;
    std::uint64_t low = from[0];
#pragma unroll
    for (int w = 0; w < Framing::kWords; ++w) {
      if (w >= words()) break;
      const std::uint64_t high = past > 0 || w + 1 < words() ? from[w + 1] : 0;
      data.at[w] = past > 0 ? low >> 8 * past | high << (64 - 8 * past) : low;
      low = high;
    }
    return data;
  }
  __device__ static void store(byte* dst, unsigned at, unsigned bytes, const Data& data) {
    const int mine = left(at, bytes);
    const auto past = reinterpret_cast<std::uintptr_t>(dst + at) % 8;
    if (mine < 8 * words() || past % 2 != 0) return store_bytes<Framing::kWords>(dst + at, mine, data);
    if (past == 0) store_parts<std::uint64_t>(dst + at, words(), data);
    else if (past == 4) store_parts<std::uint32_t>(dst + at, words(), data);
    else store_parts<std::uint16_t>(dst + at, words(), data);
  }
};

}  // namespace unisono::cuda
