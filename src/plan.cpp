#include "plan.hpp"

#include <algorithm>
#include <limits>
#include <string>

#include "unisono/error.hpp"

namespace unisono {
namespace {

constexpr std::size_t kRest = std::numeric_limits<std::size_t>::max();
constexpr Collective kMoving[] = {Collective::reduce,  Collective::broadcast,  Collective::all_gather,   Collective::gather,
                                  Collective::scatter, Collective::all_to_all, Collective::reduce_scatter};
constexpr Collective kPairwise[] = {Collective::all_to_all_v, Collective::send, Collective::recv, Collective::send_recv};

}  // namespace

std::string_view name_of(Algorithm algorithm) {
  constexpr std::string_view names[kAlgorithms] = {
      "automatic",       "one_shot_packets",          "one_shot",     "two_shot_packets", "two_shot",
      "two_shot_direct", "reduce_scatter_all_gather", "push_packets", "push",             "scatter_all_gather",
      "direct"};
  return names[static_cast<int>(algorithm)];
}

std::vector<Algorithm> Plan::algorithms(Collective collective) {
  using enum Algorithm;
  switch (collective) {
    case Collective::all_reduce:
      return {one_shot_packets, one_shot, two_shot_packets, two_shot, two_shot_direct, reduce_scatter_all_gather};
    case Collective::broadcast: return {push_packets, push, scatter_all_gather, direct};
    case Collective::barrier:
    case Collective::empty: return {};
    default: return {push_packets, push, direct};
  }
}

// The built-in table, from results/cpu-2-cores (`unisono tune` on 2 and 8 ranks): packets while a piece is a few lines, the
// one-step program until bytes weigh more than steps, zero-copy as soon as the buffers allow it.
Plan::Plan(int ranks) {
  using enum Algorithm;
  const auto n = static_cast<std::size_t>(ranks);
  for (const bool symmetric : {false, true}) {
    entries_.push_back({Collective::all_reduce, symmetric, 2048, one_shot_packets});
    if (ranks == 2) entries_.push_back({Collective::all_reduce, symmetric, 32768, one_shot});
    entries_.push_back({Collective::all_reduce, symmetric, kRest, symmetric ? two_shot_direct : two_shot});
    for (const Collective collective : kMoving) {
      const bool whole = collective == Collective::reduce || collective == Collective::broadcast;
      entries_.push_back({collective, symmetric, whole ? 2048 : 2048 * n, push_packets});
      entries_.push_back({collective, symmetric, kRest, symmetric ? direct : push});
    }
    for (const Collective collective : kPairwise) {
      entries_.push_back({collective, symmetric, 2048, push_packets});
      entries_.push_back({collective, symmetric, kRest, push});
    }
  }
}

void Plan::set(const std::vector<Entry>& entries) {
  for (const Entry& entry : entries) {
    const auto known = algorithms(entry.collective);
    if (std::find(known.begin(), known.end(), entry.algorithm) == known.end())
      throw UsageError("the plan table gives " + std::string(name_of(entry.collective)) + " the algorithm " +
                       std::string(name_of(entry.algorithm)) + ", which it cannot run: write the table again with `unisono tune`.");
  }
  auto replaced = [&](const Entry& old) {
    return std::any_of(entries.begin(), entries.end(), [&](const Entry& entry) {
      return entry.collective == old.collective && entry.symmetric == old.symmetric;
    });
  };
  std::erase_if(entries_, replaced);
  entries_.insert(entries_.end(), entries.begin(), entries.end());
  std::stable_sort(entries_.begin(), entries_.end(),
                   [](const Entry& a, const Entry& b) { return a.up_to_bytes < b.up_to_bytes; });
}

Algorithm Plan::choose(Collective collective, std::size_t bytes, bool symmetric) const {
  for (const Entry& entry : entries_)
    if (entry.collective == collective && entry.symmetric == symmetric && bytes <= entry.up_to_bytes) return entry.algorithm;
  return staged(collective);
}

}  // namespace unisono
