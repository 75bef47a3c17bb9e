// Rows, compiled once for each instruction set, which UNISONO_ISA names.
#include "host/rows.hpp"

#include <algorithm>
#include <cstring>

#include "base/scales.hpp"
#include "host/lanes.hpp"
#include "host/move.hpp"

namespace unisono::host::UNISONO_ISA {
namespace {

// Weighs as many of `count` elements as fill vectors. Returns their number.
template <class T>
std::size_t weigh_lanes(byte* out, const byte* const* rows, const float* weights, int n, std::size_t count) {
  std::size_t i = 0;
  for (; i + kStrip * kLanes <= count; i += kStrip * kLanes) {
    const std::size_t here = i * sizeof(T);
    auto sums = Lanes<T>::template widen<kStrip>(rows[0] + here);
    for (Floats& sum : sums.part) sum = weights[0] * sum;
    for (int s = 1; s < n; ++s) {
      const auto next = Lanes<T>::template widen<kStrip>(rows[s] + here);
      for (std::size_t k = 0; k < kStrip; ++k) sums.part[k] += weights[s] * next.part[k];
    }
    Lanes<T>::narrow(out + here, sums);
  }
  return i;
}

template <class T>
void weigh(byte* out, const byte* const* rows, const float* weights, int n, std::size_t count) {
  if (!weights) {
    if (n == 1) return void(std::memmove(out, rows[0], count * sizeof(T)));
    const Dst to{out};
    return kernels.reduce[static_cast<int>(kDType<T>)][static_cast<int>(Op::sum)](&to, 1, rows, n,
                                                                                  count * sizeof(T));
  }
  std::size_t at = 0;
  if constexpr (Lanes<T>::kAny) at = weigh_lanes<T>(out, rows, weights, n, count);
  constexpr std::size_t kStep = 256;  // elements; their sums stay in the first-level cache
  float sums[kStep];
  for (; at < count; at += kStep) {
    const std::size_t length = std::min(kStep, count - at), here = at * sizeof(T);
    for (std::size_t i = 0; i < length; ++i) sums[i] = weights[0] * Wide<T>::from(load<T>(rows[0] + here, i));
    for (int s = 1; s < n; ++s)
      for (std::size_t i = 0; i < length; ++i)
        sums[i] = sums[i] + weights[s] * Wide<T>::from(load<T>(rows[s] + here, i));
    for (std::size_t i = 0; i < length; ++i) store<T>(out + here, i, Wide<T>::to(sums[i]));
  }
}

// Copies a block's elements. All blocks except the last have a length that the compiler knows.
inline void copy_block(void* to, const void* from, std::size_t count, std::size_t size) {
  if (count == scales::kBlock) std::memcpy(to, from, scales::kBlock * size);
  else std::memcpy(to, from, count * size);
}

template <class T, MoeScales form>
void quantise(byte* codes, byte* block_scales, const byte* row, std::size_t count) {
  constexpr std::size_t kBlock = scales::kBlock;
  const std::size_t blocks = scales::blocks_of(count);
  for (std::size_t b = 0; b < blocks; ++b) {
    const std::size_t begin = b * kBlock, length = std::min(kBlock, count - begin);
    T elements[kBlock];
    if (length < kBlock) std::memset(elements, 0, sizeof elements);
    copy_block(elements, row + begin * sizeof(T), length, sizeof(T));
    float values[kBlock];
    for (std::size_t i = 0; i < kBlock; ++i) values[i] = Wide<T>::from(elements[i]);
    std::uint32_t largest = 0;
    for (std::size_t i = 0; i < kBlock; ++i)
      largest = std::max(largest, numeric::as_bits(values[i]) & 0x7fffffffu);
    float inverse;
    if constexpr (form == MoeScales::mx) {
      const std::uint32_t power = scales::power_of(largest);
      store(block_scales, b, static_cast<std::uint8_t>(power));
      inverse = scales::inverse_of_power(power);
    } else {
      store(block_scales, b, scales::scale_of(largest));
      inverse = scales::inverse_of(largest);
    }
    std::uint8_t block[kBlock];
    if (scales::finite(largest))
      for (std::size_t i = 0; i < kBlock; ++i) block[i] = scales::code_of(values[i], inverse);
    else std::memset(block, scales::kNanCode, kBlock);
    copy_block(codes + begin, block, length, 1);
  }
  if constexpr (form == MoeScales::mx)
    std::memset(block_scales + blocks, 0, scales::power_bytes_of(count) - blocks);
}

#define UNISONO_QUANTISE_ROWS(T) {nullptr, quantise<T, MoeScales::e4m3_128>, quantise<T, MoeScales::mx>}

}  // namespace

extern const Rows rows;
const Rows rows = {
    {weigh<float>, nullptr, weigh<F16>, weigh<BF16>},
    {UNISONO_QUANTISE_ROWS(float), {}, UNISONO_QUANTISE_ROWS(F16), UNISONO_QUANTISE_ROWS(BF16)}};

}  // namespace unisono::host::UNISONO_ISA
