#include "core/plan.hpp"

#include <algorithm>
#include <iterator>
#include <limits>
#include <string>

#include "programs/list.hpp"
#include "unisono/error.hpp"

namespace unisono {
namespace {

constexpr std::size_t kRest = std::numeric_limits<std::size_t>::max();

#define UNISONO_PROGRAM_CASE(collective, algorithm, program, operand) \
  case program_key(Collective::collective, Algorithm::algorithm):
#define UNISONO_GPU_CASE(collective, algorithm) \
  case program_key(Collective::collective, Algorithm::algorithm):

// Returns whether there is a program of that form. programs/list.hpp does not name those of calls between two
// ranks, and of messages whose two ranks tell each other where they belong.
bool has_program(Collective collective, Algorithm form) {
  if (traits_of(collective).two_ended) return form == Algorithm::push || form == Algorithm::direct;
  if (collective == Collective::all_to_all_v && form == Algorithm::direct) return true;
  switch (program_key(collective, form)) {
    UNISONO_PUSH_PROGRAMS(UNISONO_PROGRAM_CASE)
    UNISONO_STORE_PROGRAMS(UNISONO_PROGRAM_CASE)
    UNISONO_LOAD_PROGRAMS(UNISONO_PROGRAM_CASE)
    return true;
    default: return false;
  }
}

bool gpu_has(Collective collective, Algorithm algorithm) {
  switch (program_key(collective, algorithm)) {
    UNISONO_GPU_ALGORITHMS(UNISONO_GPU_CASE)
    return true;
    default: return false;
  }
}

#undef UNISONO_PROGRAM_CASE
#undef UNISONO_GPU_CASE

// The collectives with a plan of their own that go by push, which are all but all_reduce.
std::vector<Collective> pushed() {
  std::vector<Collective> all;
  for (int i = 0; i < kCollectives; ++i)
    if (const auto c = static_cast<Collective>(i);
        planned_as(c) == c && c != Collective::batch_send_recv && has_program(c, Algorithm::push))
      all.push_back(c);
  return all;
}

// The built-in tables for GPUs: src/core/plans/*.json, by cmake/Plans.cmake.
struct Row {
  std::string_view card;
  int ranks;
  Plan::Entry entry;
};
constexpr Row kTables[] = {
#include "plans.inc"
};
constexpr std::string_view kUsualCard = "NVIDIA H200";

// Returns whether fused norms (src/fused) have an algorithm: over the host's chunks or direct, or over a
// GPU's packets and lines. two_shot on a GPU: an all_reduce, then the rest.
bool norms_have(Algorithm algorithm, Level level) {
  if (algorithm == Algorithm::two_shot_direct) return level == Level::host;
  const Algorithm form = form_of(algorithm);
  if (form != Algorithm::one_shot && form != Algorithm::two_shot) return false;
  if (algorithm == Algorithm::two_shot) return true;
  return (traits_of(algorithm).pieces == Pieces::chunks) == (level == Level::host);
}

// How sums go across nodes (nodes/sums.hpp); what only moves goes one way.
bool nodes_have(Collective collective, Algorithm algorithm) {
  if (!traits_of(collective).combines) return false;
  if (algorithm == Algorithm::one_shot) return collective != Collective::reduce_scatter;
  return algorithm == Algorithm::two_shot || algorithm == Algorithm::chain;
}

}  // namespace

bool Plan::has(Collective collective, Algorithm algorithm, Level level) {
  if (level == Level::nodes) return nodes_have(collective, algorithm);
  if (collective == Collective::all_reduce_rms_norm) return norms_have(algorithm, level);
  if (collective == Collective::batch_send_recv) return false;  // its messages have a size each
  const bool on_gpu = level == Level::device;
  if (on_gpu && gpu_has(collective, algorithm)) return true;
  return has_program(collective, form_of(algorithm)) && (on_gpu || !is_lines(algorithm));
}

std::vector<Algorithm> Plan::algorithms(Collective collective, Level level) {
  std::vector<Algorithm> all;
  all.reserve(kAlgorithms);
  for (int i = 0; i < kAlgorithms; ++i)
    if (const auto algorithm = static_cast<Algorithm>(i); has(collective, algorithm, level))
      all.push_back(algorithm);
  return all;
}

namespace {

constexpr std::size_t kKiB = 1024;

// Up to which size of a call each kind of program is the best; 0: of none.
struct Borders {
  std::size_t one_shot, two_shot = 0;  // of all_reduce
  std::size_t push;                    // of most
  std::size_t push_of_all = push;      // of all_gather, all_to_all and all_to_all_v
  std::size_t push_of_pair = push;     // of send_recv
  std::size_t push_of_broadcast = push;
  std::size_t push_of_parts = push;  // of gather and scatter
  std::size_t norm = kRest;          // of a fused norm over chunks

  std::size_t push_up_to(Collective collective) const {
    const CollectiveTraits& traits = traits_of(collective);
    if (traits.two_ended) return push_of_pair;
    if (traits.combines) return push;
    if (traits.by_parts()) return push_of_all;
    if (traits.by_blocks()) return traits.rooted() ? push_of_parts : push_of_all;
    return traits.rooted() ? push_of_broadcast : push;
  }
};

// `reached`: a direct move between two ranks needs no help of the kernel.
Borders borders_of(const Plan::Host& host, bool reached) {
  const auto n = static_cast<std::size_t>(host.ranks);
  const auto a_core = static_cast<std::size_t>(host.ranks_a_core);
  const bool crowded = a_core > 1;
  if (crowded && reached) {
    const std::size_t turns = 16 * kKiB * n;
    return {.one_shot = 16 * kKiB, .push = turns, .push_of_parts = 4 * turns, .norm = 32 * kKiB};
  }
  if (crowded) {
    const std::size_t most = 4096 * kKiB / (a_core * a_core);  // chunks of all ranks share a cache
    if (host.kernel_fast)
      return {.one_shot = 16 * kKiB,
              .two_shot = 256 * kKiB / a_core,
              .push = most / 2,
              .push_of_pair = 64 * kKiB,
              .push_of_parts = 1024 * kKiB / a_core};
    return {.one_shot = 16 * kKiB,  // the kernel may yet be fast, by the caller's pages, which nobody knows
            .two_shot = 256 * kKiB,
            .push = most,
            .push_of_all = most / 2,
            .push_of_pair = 128 * kKiB};
  }
  if (reached) {
    const std::size_t step = (host.cached ? 16 : 4) * kKiB;
    return {.one_shot = 2 * step / n, .push = step, .push_of_pair = step / 2, .norm = 8 * kKiB};
  }
  // above these borders ranks learn which way is the faster one (host/call_ways.hpp)
  if (n == 2 && host.kernel_fast)
    return {.one_shot = 16 * kKiB, .push = 16 * kKiB, .push_of_pair = 8 * kKiB, .norm = 16 * kKiB};
  if (n == 2)  // of sums two steps carry as many bytes as one, and make each sum once
    return {.one_shot = (host.cached ? 32 : 64) * kKiB,
            .two_shot = 64 * kKiB,
            .push = 64 * kKiB,
            .push_of_pair = 16 * kKiB};
  if (!host.cached)
    return {.one_shot = 64 / n * kKiB,
            .push = 32 * kKiB,
            .push_of_pair = 16 * kKiB,
            .push_of_broadcast = 128 * kKiB};
  const std::size_t through = 512 * kKiB;
  return {.one_shot = 64 * kKiB / n, .two_shot = through, .push = through, .push_of_pair = through / 4};
}

// Returns up to how many bytes one step pays among `ranks` ranks, if it pays up to `bytes` among `measured`:
// a rank sends as much to its peers together (docs/notes/gpu-kernels.md).
std::size_t one_step_bytes(std::size_t bytes, int measured, int ranks) {
  if (bytes == kRest || measured == ranks || ranks == 1) return bytes;
  return bytes * static_cast<std::size_t>(measured - 1) / static_cast<std::size_t>(ranks - 1);
}

}  // namespace

// The built-in table, measured on 2 cores with 2, 3, 4 and 8 ranks (DESIGN.md, "Plans"): packets while a
// piece is a few lines; then one step over chunks, as long as what a direct program needs to begin (places
// told, a meeting at the end) costs more than its copies. Where ranks take turns on a core that is dear, and
// so is the kernel's help, but less so on machines whose kernel copies fast (kernel_fast). For calls of two
// ranks the plan says from where on the kernel's one copy may cost less than two through chunks: on such
// machines it does so early.
Plan Plan::of_host(const Host& host) {
  using enum Algorithm;
  Plan plan(Level::host);
  const auto n = static_cast<std::size_t>(host.ranks);
  // Returns up to which size a call goes as packets. Where lines are let go of, that is one packet a message:
  // a piece takes no longer than two. split: the call's bytes are of a message for each rank.
  const auto packets = [&](bool split) {
    if (host.lets_go && host.ranks_a_core == 1) return Host::kPacket * (split ? n : 1);
    const std::size_t most = host.ranks_a_core > 1 ? kKiB : kKiB / 8;
    return split ? most / 2 * n : most;
  };
  for (const bool symmetric : {false, true}) {
    const Borders up_to = borders_of(host, symmetric || host.one_process);
    plan.add({Collective::all_reduce, symmetric, packets(false), one_shot_packets});
    plan.add({Collective::all_reduce, symmetric, up_to.one_shot, one_shot});
    plan.add({Collective::all_reduce, symmetric, up_to.two_shot, two_shot});
    plan.add({Collective::all_reduce, symmetric, kRest, two_shot_direct});
    // two steps are faster at once, except if ranks take turns on a core
    if (host.ranks_a_core > 1) plan.add({Collective::all_reduce_rms_norm, symmetric, 32 * kKiB, one_shot});
    plan.add({Collective::all_reduce_rms_norm, symmetric, up_to.norm, two_shot});
    plan.add({Collective::all_reduce_rms_norm, symmetric, kRest, two_shot_direct});
    for (const Collective collective : pushed()) {
      const CollectiveTraits& traits = traits_of(collective);
      const bool split = traits.by_blocks() || traits.by_parts();  // into a message for each rank
      const bool reaches = has_program(collective, direct);
      plan.add({collective, symmetric, packets(split), push_packets});
      plan.add({collective, symmetric, reaches ? up_to.push_up_to(collective) : kRest, push});
      if (reaches) plan.add({collective, symmetric, kRest, direct});
    }
  }
  return plan;
}

bool Plan::has_table(std::string_view card) {
  return std::any_of(std::begin(kTables), std::end(kTables),
                     [&](const Row& row) { return row.card == card; });
}

Plan Plan::of_gpu(std::string_view card, int ranks) {
  const std::string_view of = has_table(card) ? card : kUsualCard;
  int fewest = 0, most = 0;  // of the tables with enough ranks, and of all
  for (const Row& row : kTables) {
    if (row.card != of) continue;
    most = std::max(most, row.ranks);
    if (row.ranks >= ranks) fewest = fewest ? std::min(fewest, row.ranks) : row.ranks;
  }
  std::vector<Entry> entries;
  for (const Row& row : kTables)
    if (row.card == of && row.ranks == (fewest ? fewest : most)) {
      entries.push_back(row.entry);
      if (form_of(row.entry.algorithm) == Algorithm::one_shot)
        entries.back().up_to_bytes = one_step_bytes(row.entry.up_to_bytes, row.ranks, ranks);
    }
  Plan plan(Level::device);
  plan.set(entries);
  return plan;
}

// Packets, which double what crosses PCIe, while that costs less than the flags of a chunk; the copy out of a
// ring costs little beside PCIe. By reckoning, not by measurement.
Plan Plan::of_gpu_over_pcie(int ranks) {
  using enum Algorithm;
  Plan plan(Level::device);
  for (const bool symmetric : {false, true}) {
    plan.add({Collective::all_reduce, symmetric, (ranks == 2 ? 64 : 16) * kKiB, one_shot_packets});
    plan.add({Collective::all_reduce, symmetric, 128 * kKiB, two_shot_packets});
    plan.add({Collective::all_reduce, symmetric, kRest, two_shot});
    for (const Collective collective : pushed()) {
      plan.add({collective, symmetric, 64 * kKiB, push_packets});
      plan.add({collective, symmetric, kRest, push});
    }
  }
  return plan;
}

// One step while all that leaves a GPU takes less than a second step's latency; then as few bytes as there
// can be, straight to where they belong if every rank reaches it. By reckoning, not by measurement.
Plan Plan::of_many_gpus(int ranks) {
  using enum Algorithm;
  Plan plan(Level::device);
  constexpr std::size_t kStep = 512 * kKiB;  // what a GPU's links carry in about two microseconds
  const std::size_t of_each = kStep / static_cast<std::size_t>(ranks);
  for (const bool symmetric : {false, true}) {
    plan.add({Collective::all_reduce, symmetric, of_each, one_shot});
    plan.add({Collective::all_reduce, symmetric, kRest, symmetric ? two_shot_push : two_shot});
    for (const Collective collective : pushed()) {
      const CollectiveTraits& traits = traits_of(collective);
      const bool messages = traits.two_ended || traits.by_parts();
      Algorithm large = push;
      if (messages || symmetric) large = collective == Collective::reduce ? two_shot_push : direct;
      else if (collective == Collective::broadcast) large = scatter_all_gather;
      plan.add({collective, symmetric, messages ? 16 * kStep : of_each, push});
      plan.add({collective, symmetric, kRest, large});
    }
  }
  return plan;
}

// One step while latency counts; then as few bytes as there can be. What goes to registered memory needs no
// ring.
Plan Plan::of_fabric() {
  using enum Algorithm;
  Plan plan(Level::host);
  for (const bool symmetric : {false, true}) {
    plan.add({Collective::all_reduce, symmetric, std::size_t{32} << 10, one_shot});
    plan.add({Collective::all_reduce, symmetric, kRest, two_shot});
    for (const Collective collective : pushed()) {
      if (symmetric && stores_only(collective)) {
        plan.add({collective, symmetric, std::size_t{64} << 10, push});
        plan.add({collective, symmetric, kRest, direct});
      } else {
        plan.add({collective, symmetric, kRest, push});
      }
    }
  }
  return plan;
}

Plan Plan::of_fabric_gpu() {
  Plan plan(Level::device);
  for (const bool symmetric : {false, true})
    plan.add({Collective::all_to_all, symmetric, kRest, Algorithm::direct});
  return plan;
}

void check_shape(const Shape& shape, const std::string& who) {
  if (shape.blocks >= 0 && shape.threads >= 0 && shape.threads % 32 == 0 &&
      shape.threads <= Shape::kMostThreads)
    return;
  throw UsageError(who + " " + std::to_string(shape.blocks) + " blocks of " + std::to_string(shape.threads) +
                   " threads: blocks count from 0, threads are whole warps of 32, up to " +
                   std::to_string(Shape::kMostThreads) + ".");
}

void Plan::set(const std::vector<Entry>& entries) {
  for (const Entry& entry : entries) {
    if (!has(entry.collective, entry.algorithm, level_))
      throw UsageError("the plan table gives " + std::string(name_of(entry.collective)) + " the algorithm " +
                       std::string(name_of(entry.algorithm)) +
                       ", which it cannot run: write the table again with `unisono tune`.");
    check_shape(entry.shape, "the plan table gives " + std::string(name_of(entry.collective)));
  }
  for (const Entry& entry : entries) range(entry.collective, entry.symmetric).clear();
  for (const Entry& entry : entries) {
    auto& known = range(entry.collective, entry.symmetric);
    const auto larger =
        std::upper_bound(known.begin(), known.end(), entry.up_to_bytes,
                         [](std::size_t bytes, const Entry& other) { return bytes < other.up_to_bytes; });
    known.insert(larger, entry);
  }
}

const Plan::Entry* Plan::find(Collective collective, std::size_t bytes, bool symmetric) const {
  // on GPUs no rank knows whether the other of two has symmetric memory
  const CollectiveTraits& traits = traits_of(collective);
  if (level_ == Level::device && (traits.two_ended || traits.by_parts())) symmetric = false;
  for (const Entry& entry : entries_[static_cast<int>(collective)][symmetric])
    if (bytes <= entry.up_to_bytes) return &entry;
  return nullptr;
}

const Plan::Entry* Plan::of_messages(bool direct) const {
  const auto& known = entries_[static_cast<int>(Collective::all_to_all_v)][false];
  const auto last = std::find_if(known.rbegin(), known.rend(),
                                 [&](const Entry& entry) { return is_direct(entry.algorithm) == direct; });
  return last == known.rend() ? nullptr : &*last;
}

Algorithm Plan::choose(Collective collective, std::size_t bytes, bool symmetric) const {
  const bool on_gpu = level_ == Level::device;
  if (collective == Collective::batch_send_recv && !on_gpu)  // both ends of a message do alike
    return is_packets(choose(Collective::send_recv, bytes, false)) ? Algorithm::push_packets
                                                                   : Algorithm::push;
  const bool batch = collective == Collective::batch_send_recv;
  const Entry* found = find(batch ? Collective::send_recv : collective, bytes, symmetric);
  const bool tells = found && is_direct(found->algorithm) && symmetric;
  if (on_gpu && traits_of(collective).by_parts() && !tells) found = of_messages(false);
  return found ? found->algorithm : staged(collective);
}

Shape Plan::shape(Collective collective, std::size_t bytes, bool symmetric, Algorithm algorithm) const {
  const bool parts = level_ == Level::device && traits_of(collective).by_parts();
  const Entry* found = parts ? of_messages(is_direct(algorithm)) : find(collective, bytes, symmetric);
  if (parts && !found) found = find(Collective::send_recv, kRest, false);
  return found && found->algorithm == algorithm ? found->shape : Shape{};
}

}  // namespace unisono
