// How ranks meet at a bootstrap: what each says of itself to all.
#pragma once

#include <string>
#include <vector>

#include "unisono/bootstrap.hpp"
#include "unisono/error.hpp"

namespace unisono {

// Throws UsageError unless the bootstrap's rank is one of its size, which is at most `most`.
inline void check_rank(int rank, int size, int most) {
  if (0 <= rank && rank < size && size <= most) return;
  throw UsageError("rank " + std::to_string(rank) + " of " + std::to_string(size) +
                   " is not possible: the rank is from 0 to size-1, the size from 1 to " +
                   std::to_string(most) + ".");
}

// Returns everyone's greeting, in rank order. Collective. Throws UsageError unless the bootstrap gives one
// for each rank.
inline std::vector<std::string> greet(Bootstrap& bootstrap, const std::string& greeting) {
  auto all = bootstrap.all_gather(greeting);
  if (all.size() == static_cast<std::size_t>(bootstrap.size())) return all;
  throw UsageError("the bootstrap gave " + std::to_string(all.size()) + " greetings for " +
                   std::to_string(bootstrap.size()) + " ranks: return one entry for each rank.");
}

}  // namespace unisono
