// Lines of an exchange that carry the wire form of a quantised all_reduce (base/wire.hpp).
#pragma once

#include "cuda/device/framing.cuh"
#include "cuda/device/quantise.cuh"

namespace unisono::cuda {

// Two lines carry seven blocks. In each line seven threads have half a block each, the eighth one has the
// scales of the line's four blocks, and the flag. The fourth block is in both lines, as is its scale.
template <class T, class Code>
struct WireLines : Lines {
  static constexpr unsigned kPair = 2 * kLineUnits, kHalves = kPair - 2;  // of a pair of lines

  __device__ static unsigned offset(unsigned unit) {
    return head(unit) + half_of(unit) * kHalf * static_cast<unsigned>(sizeof(T));
  }
  __device__ static unsigned head(unsigned unit) {
    return unit / kPair * kHalves * kHalf * static_cast<unsigned>(sizeof(T));
  }

  // Load and store the elements of a thread's unit, `at` bytes into a buffer of `bytes`. Requires: all
  // threads of a pair of lines call them.
  __device__ static Data load(const byte* src, unsigned at, unsigned bytes) {
    float values[kHalf] = {};
    if (has_half()) load_elements<T>(src, at / sizeof(T), bytes / sizeof(T), aligned(src), values);
    return encode(values);
  }
  __device__ static void store(byte* dst, unsigned at, unsigned bytes, const Data& data) {
    float values[kHalf];
    decode(data, values);
    if (has_half()) store_elements<T>(dst, at / sizeof(T), bytes / sizeof(T), aligned(dst), values);
  }

  // Convert a pair of lines. Requires: all of its threads call them.
  __device__ static void decode(const Data& data, float (&values)[kHalf]) {
    const auto scales =
        __shfl_sync(lanes(), static_cast<std::uint32_t>(data.at[0]), lane() | (kLineUnits - 1));
    const unsigned which = (unit() % kLineUnits + unit() / kLineUnits) / 2;
    const Half half{{static_cast<std::uint32_t>(data.at[0]), static_cast<std::uint32_t>(data.at[0] >> 32),
                     static_cast<std::uint32_t>(data.at[1]), static_cast<std::uint32_t>(data.at[1] >> 32)},
                    scales >> 8 * which & 0xff};
    cuda::decode<Code>(half, values);
  }
  __device__ static Data encode(const float (&values)[kHalf]) {
    const unsigned other = half_of(unit()) ^ 1, partner = other + other / (kLineUnits - 1);
    const Half half = encode_with<Code>(values, lanes(), has_half() ? first() + partner : lane());
    std::uint32_t scales = 0;
#pragma unroll
    for (unsigned s = 0; s < 4; ++s) {
      const unsigned from = unit() < kLineUnits ? 2 * s : kLineUnits + (s > 0 ? 2 * s - 1 : 0);
      scales |= __shfl_sync(lanes(), half.scale, first() + from) << 8 * s;
    }
    if (!has_half()) return {{scales, 0}};
    return {
        {half.codes.x | std::uint64_t{half.codes.y} << 32, half.codes.z | std::uint64_t{half.codes.w} << 32}};
  }

 private:
  __device__ static unsigned lane() { return threadIdx.x % 32; }
  __device__ static unsigned unit() { return lane() % kPair; }  // within its pair of lines
  __device__ static unsigned first() { return lane() - unit(); }
  __device__ static unsigned lanes() { return 0xffffu << first(); }
  // Returns the number of a unit's half block in its pair of lines, in the order of the elements.
  __device__ static unsigned half_of(unsigned unit) { return unit % kPair - unit % kPair / kLineUnits; }
  __device__ static bool has_half() { return has(1); }
  __device__ static bool aligned(const byte* at) {
    return reinterpret_cast<std::uintptr_t>(at) % sizeof(uint4) == 0;
  }
};

// The sum of all ranks' units, or their average.
struct SumOfWire {
  template <class Framing, int kMost>
  __device__ static typename Framing::Data combine(const Exchange& x, const typename Framing::Data& own,
                                                   const Packet (&got)[kMost]) {
    float sum[kHalf], values[kHalf];
#pragma unroll
    for (int r = 0; r <= kMost; ++r) {
      if (kMost > 1 && r >= x.ranks) break;
      typename Framing::Data data = Framing::data(got[r < kMost ? r : r - 1]);
      if (r > x.rank) data = Framing::data(got[r > 0 ? r - 1 : r]);
      if (r == x.rank) data = own;
      Framing::decode(data, values);
#pragma unroll
      for (int e = 0; e < kHalf; ++e) sum[e] = r == 0 ? values[e] : sum[e] + values[e];
    }
    if (x.op == Op::avg) {
#pragma unroll
      for (int e = 0; e < kHalf; ++e) sum[e] = sum[e] / static_cast<float>(x.ranks);
    }
    return Framing::encode(sum);
  }
};

}  // namespace unisono::cuda
