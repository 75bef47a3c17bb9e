// How data and flag travel in one store. A ring is an array of units of 16 bytes, one for each thread.
#pragma once

#include "lane/cuda/layout.hpp"
#include "lane/cuda/memory.cuh"

namespace unisono::cuda {

// The payload of a unit.
template <int kCount>
struct Words {
  std::uint64_t at[kCount] = {};
};

// Any address, any number of bytes, 0 and less included.
template <int kCount>
__device__ __noinline__ Words<kCount> load_bytes(const byte* src, int bytes) {
  Words<kCount> words;
#pragma unroll
  for (int w = 0; w < kCount; ++w)
#pragma unroll 1
    for (int b = 0; b < 8 && 8 * w + b < bytes; ++b)
      words.at[w] |= static_cast<std::uint64_t>(src[8 * w + b]) << (8 * b);
  return words;
}
template <int kCount>
__device__ __noinline__ void store_bytes(byte* dst, int bytes, Words<kCount> words) {
#pragma unroll
  for (int w = 0; w < kCount; ++w)
#pragma unroll 1
    for (int b = 0; b < 8 && 8 * w + b < bytes; ++b)
      dst[8 * w + b] = static_cast<byte>(words.at[w] >> (8 * b));
}

// Every unit has its own flag, half of it: the least latency, and half the bandwidth (NCCL's LL, with units
// of 16 bytes).
struct Packets {
  static constexpr int kWords = 1;
  static constexpr bool kBulk = false;  // whether messages can be so long that the order of peers matters
  using Data = Words<kWords>;

  __device__ static unsigned offset(unsigned unit) { return unit * static_cast<unsigned>(kPacketBytes); }
  // Bytes before the unit whose presence decides whether it travels.
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
  // Whether a unit has a word w.
  __device__ static bool has(int) { return true; }
  // Each thread goes its own way.
  __device__ static bool all(bool mine) { return mine; }
  __device__ static bool any(bool mine) { return mine; }
};

// Eight units are a line of 128 bytes: 120 of data and, in its last word, the flag. Eight neighbours of a
// warp store and load it by one instruction each, which NVLink carries and memory serves as a whole: NCCL's
// LL128, which rests on the same. Whatever decides whether a unit is stored or loaded is the same for the
// eight.
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

  // Every thread of the warp calls it; `there` is the same for a line.
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

// The payload of a thread's unit, `at` bytes into a buffer of `bytes`. All buffers and sizes are whole words.
template <class Framing>
struct Whole : Framing {
  using typename Framing::Data;
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

// Buffers and sizes are what they are.
template <class Framing>
struct Ragged : Framing {
  using typename Framing::Data;
  __device__ static int left(unsigned at, unsigned bytes) {
    const int all = static_cast<int>(bytes - at), most = Framing::has(1) ? 8 * Framing::kWords : 8;
    return all < most ? all : most;
  }
  __device__ static Data load(const byte* src, unsigned at, unsigned bytes) {
    return load_bytes<Framing::kWords>(src + at, left(at, bytes));
  }
  __device__ static void store(byte* dst, unsigned at, unsigned bytes, const Data& data) {
    store_bytes<Framing::kWords>(dst + at, left(at, bytes), data);
  }
};

}  // namespace unisono::cuda
