// Inputs of ints, which differ in every element and on every rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace unisono::test {

using Ints = std::vector<std::int32_t>;

// Returns the element i of a rank's input; block b begins at b*count.
inline std::int32_t value(int rank, std::size_t i) {
  return rank * 100003 + static_cast<std::int32_t>(i) * 7 + 1;
}
inline Ints input(int rank, std::size_t elements) {
  Ints x(elements);
  for (std::size_t i = 0; i < elements; ++i) x[i] = value(rank, i);
  return x;
}

}  // namespace unisono::test
