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
  constexpr std::string_view names[kAlgorithms] = {"automatic",          "one_shot_packets",
                                                   "one_shot",           "two_shot_packets",
                                                   "two_shot",           "two_shot_push",
                                                   "two_shot_direct",    "reduce_scatter_all_gather",
                                                   "push_packets",       "push",
                                                   "scatter_all_gather", "direct",
                                                   "copy_engine"};
  return names[static_cast<int>(algorithm)];
}

std::vector<Algorithm> Plan::algorithms(Collective collective, Memory memory) {
  using enum Algorithm;
  std::vector<Algorithm> known{push_packets, push, direct};
  switch (collective) {
    case Collective::all_reduce:
      return {one_shot_packets, one_shot,        two_shot_packets,         two_shot,
              two_shot_push,    two_shot_direct, reduce_scatter_all_gather};
    case Collective::barrier:
    case Collective::empty: return {};
    case Collective::all_to_all_v:
    case Collective::send:
    case Collective::recv:
    case Collective::send_recv:
      if (memory == Memory::device) known.pop_back();  // where a peer's part lies, only its host knows
      return known;
    case Collective::reduce:
    case Collective::reduce_scatter: return known;
    case Collective::broadcast: known.insert(known.end() - 1, scatter_all_gather); break;
    default: break;
  }
  if (memory == Memory::device) known.push_back(copy_engine);
  return known;
}

// The built-in table (`unisono tune` at 2 and 8 ranks on 2 cores): packets while a piece is a line or two;
// then one step over chunks, as long as two meetings of all ranks cost more than its copies; then direct.
// Meetings are dearest where ranks take turns on a core, and symmetric memory needs no help of the kernel,
// which is cheaper.
Plan Plan::of_host(int ranks, bool crowded) {
  using enum Algorithm;
  Plan plan(Memory::host);
  const auto n = static_cast<std::size_t>(ranks);
  for (const bool symmetric : {false, true}) {
    const std::size_t steps = std::size_t{crowded     ? 64u
                                          : symmetric ? 4u
                                                      : 32u}
                              << 10;  // up to which one step is best
    plan.add({Collective::all_reduce, symmetric, 128, one_shot_packets});
    plan.add({Collective::all_reduce, symmetric, crowded ? steps : 2 * steps / n, one_shot});
    plan.add({Collective::all_reduce, symmetric, kRest, two_shot_direct});
    for (const Collective collective : kOthers) {
      const bool pair = collective == Collective::send_recv;  // two meet, not all
      const bool whole = pair || collective == Collective::reduce || collective == Collective::broadcast;
      plan.add({collective, symmetric, whole ? 128 : 64 * n, push_packets});
      plan.add({collective, symmetric, crowded ? 16 * steps : pair ? steps / 2 : steps, push});
      plan.add({collective, symmetric, kRest, direct});
    }
  }
  return plan;
}

// Packets while their flags, half of what travels, cost less than the meetings of the others.
Plan Plan::of_gpu(int ranks) {
  using enum Algorithm;
  Plan plan(Memory::device);
  const auto n = static_cast<std::size_t>(ranks);
  constexpr std::size_t kKiB = 1024, kMiB = 1024 * kKiB;
  for (const bool symmetric : {false, true}) {
    plan.add(
        {Collective::all_reduce, symmetric, ranks == 2 ? 512 * kKiB : 256 * kKiB / n * 2, one_shot_packets});
    plan.add({Collective::all_reduce, symmetric, 2 * kMiB, two_shot_packets});
    if (symmetric) plan.add({Collective::all_reduce, symmetric, 32 * kMiB, two_shot_direct});
    plan.add({Collective::all_reduce, symmetric, kRest, symmetric ? two_shot_push : two_shot});
    for (const Collective collective : kOthers) {
      const auto known = algorithms(collective, Memory::device);
      auto has = [&](Algorithm one) { return std::find(known.begin(), known.end(), one) != known.end(); };
      plan.add({collective, symmetric, 256 * kKiB * n, push_packets});
      if (symmetric && has(copy_engine)) {
        plan.add({collective, symmetric, 32 * kMiB, direct});
        plan.add({collective, symmetric, kRest, collective == Collective::broadcast ? direct : copy_engine});
      } else {
        const bool reaches = symmetric && has(direct) && collective != Collective::reduce_scatter;
        plan.add({collective, symmetric, kRest, reaches ? direct : push});
      }
    }
  }
  return plan;
}

void Plan::set(const std::vector<Entry>& entries) {
  for (const Entry& entry : entries) {
    const auto known = algorithms(entry.collective, memory_);
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
