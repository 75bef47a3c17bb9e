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
      known = {one_shot_packets, one_shot,        two_shot_packets,         two_shot,
               two_shot_push,    two_shot_direct, reduce_scatter_all_gather};
      break;
    case Collective::barrier:
    case Collective::empty: return {};
    case Collective::send_recv: return known;
    case Collective::all_to_all_v:
    case Collective::send:
    case Collective::recv:
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

// Measured on 2 and 4 H200 (results/): packets while their flags, half of what travels, cost less than the
// meetings of the others; programs that store into the peers' buffers; copy engines where a copy takes longer
// than its start.
Plan Plan::of_gpu(int ranks) {
  using enum Algorithm;
  Plan plan(Memory::device);
  constexpr std::size_t kKiB = 1024, kMiB = 1024 * kKiB;
  const bool pair = ranks == 2;
  for (const bool symmetric : {false, true}) {
    auto add = [&](Collective collective, std::size_t up_to, Algorithm algorithm) {
      plan.add({collective, symmetric, up_to, algorithm});
    };
    add(Collective::all_reduce, (pair ? 1024 : 128) * kKiB, one_shot_packets);
    if (symmetric) {
      add(Collective::all_reduce, kMiB, two_shot_packets);
      add(Collective::all_reduce, 32 * kMiB, two_shot_direct);
      add(Collective::all_reduce, pair ? 64 * kMiB : kRest, two_shot_push);
      if (pair) add(Collective::all_reduce, kRest, copy_engine);
    } else {
      add(Collective::all_reduce, 4 * kMiB, two_shot_packets);
      add(Collective::all_reduce, kRest, two_shot);
    }
    for (const Collective collective : kOthers) {
      const bool to_one = collective == Collective::gather || collective == Collective::scatter;
      const bool copies =
          to_one || collective == Collective::all_gather || collective == Collective::all_to_all;
      const bool whole = collective == Collective::broadcast || collective == Collective::reduce;
      if (collective == Collective::send_recv) {
        add(collective, kMiB / 2, push_packets);
        add(collective, kRest, symmetric ? direct : push);
      } else if (collective == Collective::all_to_all_v) {
        add(collective, kMiB, push_packets);
        add(collective, kRest, push);
      } else if (whole) {
        add(collective, (pair ? 512 : 256) * kKiB, push_packets);
        if (!pair && collective == Collective::reduce) add(collective, 4 * kMiB, push);
        if (pair || !symmetric) {
          add(collective, pair ? kRest : 4 * kMiB, push);
          if (!pair) add(collective, kRest, collective == Collective::broadcast ? scatter_all_gather : push);
        } else {
          add(collective, kRest, direct);
        }
      } else {
        const bool gathers = collective == Collective::all_gather && !pair;
        add(collective, to_one ? 2 * kMiB : gathers ? kMiB / 2 : kMiB, push_packets);
        if (!symmetric || to_one) add(collective, symmetric ? 64 * kMiB : kRest, push);
        else add(collective, copies ? 64 * kMiB : kRest, direct);
        if (symmetric && copies) add(collective, kRest, copy_engine);
      }
    }
  }
  return plan;
}

// One step while latency counts; then as few bytes as there can be. What goes to registered memory needs no
// ring.
Plan Plan::of_fabric() {
  using enum Algorithm;
  Plan plan(Memory::host);
  for (const bool symmetric : {false, true}) {
    plan.add({Collective::all_reduce, symmetric, std::size_t{32} << 10, one_shot});
    plan.add({Collective::all_reduce, symmetric, kRest, two_shot});
    for (const Collective collective : kOthers) {
      const bool to_all = collective == Collective::all_to_all || collective == Collective::all_gather ||
                          collective == Collective::gather;
      if (symmetric && to_all) {
        plan.add({collective, symmetric, std::size_t{64} << 10, push});
        plan.add({collective, symmetric, kRest, direct});
      } else {
        plan.add({collective, symmetric, kRest, push});
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
