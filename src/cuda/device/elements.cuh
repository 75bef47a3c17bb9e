// Elements of a thread as they lie in memory. They stay in words of 32 bits until they are computed with: a
// kernel that takes 16-bit elements apart waits for their load at once.
#pragma once

#include "base/numeric.hpp"
#include "cuda/layout.hpp"

namespace unisono::cuda {

// kCount elements of f32, f16 or bf16, whole words.
template <class T, int kCount>
struct alignas(kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16) Elements {
  static constexpr int kWords = kCount * static_cast<int>(sizeof(T)) / 4, kEach = kCount / kWords;
  std::uint32_t words[kWords];

  // Requires: `from` is a multiple of 16 bytes, or of the elements' bytes if those are fewer.
  __device__ static Elements load(const T* from) { return *reinterpret_cast<const Elements*>(from); }
  __device__ void store(T* to) const { *reinterpret_cast<Elements*>(to) = *this; }

  // Loads the first `count` one by one, and zeros past them.
  __device__ static Elements load(const T* from, unsigned count) {
    Elements elements{};
#pragma unroll
    for (int e = 0; e < kCount; ++e)
      if (e < count) elements.words[e / kEach] |= bits_of(from[e]) << e % kEach * 16;
    return elements;
  }
  __device__ void store(T* to, unsigned count) const {
#pragma unroll
    for (int e = 0; e < kCount; ++e)
      if (e < count) to[e] = of_bits(words[e / kEach] >> e % kEach * 16);
  }

  __device__ void widen(float (&values)[kCount]) const {
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      const std::uint32_t word = words[e / kEach];
      if constexpr (std::is_same_v<T, BF16>)
        values[e] = numeric::as_float(e % kEach == 0 ? word << 16 : word & 0xffff0000u);
      else values[e] = Wide<T>::from(of_bits(word >> e % kEach * 16));
    }
  }
  __device__ static Elements narrow(const float (&values)[kCount]) {
    Elements elements;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      std::uint32_t& word = elements.words[w];
      if constexpr (std::is_same_v<T, BF16>)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values[2 * w + 1]), "f"(values[2 * w]));
      else if constexpr (std::is_same_v<T, F16>)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values[2 * w + 1]), "f"(values[2 * w]));
      else word = numeric::as_bits(values[w]);
    }
    return elements;
  }

 private:
  __device__ static std::uint32_t bits_of(T element) {
    if constexpr (std::is_same_v<T, float>) return numeric::as_bits(element);
    else return element.bits;
  }
  __device__ static T of_bits(std::uint32_t bits) {
    if constexpr (std::is_same_v<T, float>) return numeric::as_float(bits);
    else return {static_cast<std::uint16_t>(bits)};
  }
};

}  // namespace unisono::cuda
