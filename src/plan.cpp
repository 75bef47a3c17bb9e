#include "plan.hpp"

#include <algorithm>
#include <limits>
#include <string>

#include "unisono/error.hpp"

namespace unisono {
namespace {

constexpr std::size_t kRest = std::numeric_limits<std::size_t>::max();
constexpr Collective kOthers[] = {
    Collective::reduce,         Collective::broadcast, Collective::all_gather,
    Collective::gather,         Collective::scatter,   Collective::all_to_all,
    Collective::reduce_scatter, Collective::send_recv, Collective::all_to_all_v};

}  // namespace

std::string_view name_of(Algorithm algorithm) {
  constexpr std::string_view names[kAlgorithms] = {"automatic",
                                                   "one_shot_packets",
                                                   "one_shot",
                                                   "two_shot_packets",
                                                   "two_shot",
                                                   "two_shot_direct",
                                                   "reduce_scatter_all_gather",
                                                   "push_packets",
                                                   "push",
                                                   "scatter_all_gather",
                                                   "direct"};
  return names[static_cast<int>(algorithm)];
}

std::vector<Algorithm> Plan::algorithms(Collective collective) {
  using enum Algorithm;
  switch (collective) {
    case Collective::all_reduce:
      return {one_shot_packets, one_shot,        two_shot_packets,
              two_shot,         two_shot_direct, reduce_scatter_all_gather};
    case Collective::broadcast: return {push_packets, push, scatter_all_gather, direct};
    case Collective::barrier:
    case Collective::empty: return {};
    default: return {push_packets, push, direct};
  }
}

// The built-in table (`unisono tune` at 2 and 8 ranks on 2 cores): packets while a piece is a line or two;
// then one step over chunks, as long as two meetings of all ranks cost more than its copies; then direct.
// Meetings are dearest where ranks take turns on a core, and symmetric memory needs no help of the kernel,
// which is cheaper.
Plan::Plan(int ranks, bool crowded) {
  using enum Algorithm;
  const auto n = static_cast<std::size_t>(ranks);
  for (const bool symmetric : {false, true}) {
    auto add = [&](const Entry& entry) { range(entry.collective, symmetric).push_back(entry); };
    const std::size_t steps = std::size_t{crowded     ? 64u
                                          : symmetric ? 4u
                                                      : 32u}
                              << 10;  // up to which one step is best
    add({Collective::all_reduce, symmetric, 128, one_shot_packets});
    add({Collective::all_reduce, symmetric, crowded ? steps : 2 * steps / n, one_shot});
    add({Collective::all_reduce, symmetric, kRest, two_shot_direct});
    for (const Collective collective : kOthers) {
      const bool pair = collective == Collective::send_recv;  // two meet, not all
      const bool whole = pair || collective == Collective::reduce || collective == Collective::broadcast;
      add({collective, symmetric, whole ? 128 : 64 * n, push_packets});
      add({collective, symmetric, crowded ? 16 * steps : pair ? steps / 2 : steps, push});
      add({collective, symmetric, kRest, direct});
    }
  }
}

void Plan::set(const std::vector<Entry>& entries) {
  for (const Entry& entry : entries) {
    const auto known = algorithms(entry.collective);
    if (std::find(known.begin(), known.end(), entry.algorithm) == known.end())
      throw UsageError("the plan table gives " + std::string(name_of(entry.collective)) + " the algorithm " +
                       std::string(name_of(entry.algorithm)) +
                       ", which it cannot run: write the table again with `unisono tune`.");
  }
  for (const Entry& entry : entries) range(entry.collective, entry.symmetric).clear();
  for (const Entry& entry : entries) range(entry.collective, entry.symmetric).push_back(entry);
  for (auto& of_collective : entries_)
    for (auto& of_memory : of_collective)
      std::stable_sort(of_memory.begin(), of_memory.end(),
                       [](const Entry& a, const Entry& b) { return a.up_to_bytes < b.up_to_bytes; });
}

Algorithm Plan::choose(Collective collective, std::size_t bytes, bool symmetric) const {
  for (const Entry& entry : entries_[static_cast<int>(collective)][symmetric])
    if (bytes <= entry.up_to_bytes) return entry.algorithm;
  return staged(collective);
}

}  // namespace unisono
