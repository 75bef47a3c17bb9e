// Messages of random bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "unisono/communicator.hpp"

namespace unisono::test {

using Bytes = std::vector<std::uint8_t>;

// The content of message `number` between two ranks.
inline Bytes content(int from, int to, int number, std::size_t bytes) {
  std::minstd_rand random(static_cast<unsigned>(1 + from + 8 * to + 64 * number));
  Bytes all(bytes);
  std::generate(all.begin(), all.end(), [&] { return static_cast<std::uint8_t>(random()); });
  return all;
}
inline Call from(const Bytes& in) { return {.in = in.data(), .count = in.size(), .dtype = DType::u8}; }
inline Call into(Bytes& out) { return {.out = out.data(), .count = out.size(), .dtype = DType::u8}; }

}  // namespace unisono::test
