// Facts about each collective and each algorithm, for every layer, the bindings and the tests. Names of
// collectives, dtypes and ops are in unisono/types.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "unisono/types.hpp"

namespace unisono {

// The length of a buffer, by Call::count.
enum class Extent : std::uint8_t {
  none,
  count,   // `count` elements
  blocks,  // a block of `count` elements for each rank
  parts,   // a length for each pair of ranks
};

struct Side {
  Extent extent = Extent::none;
  bool root_only = false;  // the other ranks have no such buffer

  // Returns the offset in bytes of rank `rank`'s part, for blocks of `block` bytes.
  constexpr std::size_t begin(std::size_t block, int rank) const {
    return extent == Extent::blocks ? block * static_cast<std::size_t>(rank) : 0;
  }
};

// Inputs, outputs, both or neither.
struct Sides {
  bool in = false, out = false;
};

// In place, a rank's input equals its output if both have one length. If not, the smaller buffer is the
// rank's own block of the larger one.
struct CollectiveTraits {
  Collective collective;
  Side in{}, out{};
  bool combines = false;   // with an op, so that the dtype matters
  bool two_ended = false;  // between two ranks
  bool swaps = false;      // in place, arriving data takes the place of data not yet sent
  // The peers' buffers that a direct program reaches, on lanes that load from peers and on lanes that store
  // to peers. Neither: receivers tell their senders an address.
  Sides loads{}, stores{};

  constexpr bool rooted() const { return in.root_only || out.root_only; }
  constexpr bool by_parts() const { return in.extent == Extent::parts; }
  // Returns whether data goes from rank `from` to rank `to`.
  constexpr bool moves(int from, int to, int root) const {
    return (!in.root_only || from == root) && (!out.root_only || to == root);
  }
  // Returns whether a rank has an output.
  constexpr bool has_output(int rank, int root) const { return !out.root_only || rank == root; }
  // Returns whether the larger buffer has a block for each rank.
  constexpr bool by_blocks() const { return in.extent == Extent::blocks || out.extent == Extent::blocks; }
};

namespace traits {

inline constexpr Side kCount{Extent::count}, kBlocks{Extent::blocks}, kParts{Extent::parts};
inline constexpr Side kCountAtRoot{Extent::count, true}, kBlocksAtRoot{Extent::blocks, true};
inline constexpr Sides kIn{.in = true, .out = false}, kOut{.in = false, .out = true}, kBoth{true, true};

// In the order of the enumeration.
inline constexpr CollectiveTraits kCollectiveTraits[] = {
    {.collective = Collective::all_reduce,
     .in = kCount,
     .out = kCount,
     .combines = true,
     .loads = kBoth,
     .stores = kBoth},
    {.collective = Collective::reduce,
     .in = kCount,
     .out = kCountAtRoot,
     .combines = true,
     .loads = kBoth,
     .stores = kBoth},
    {.collective = Collective::broadcast, .in = kCountAtRoot, .out = kCount, .loads = kBoth, .stores = kBoth},
    {.collective = Collective::all_gather, .in = kCount, .out = kBlocks, .loads = kIn, .stores = kOut},
    {.collective = Collective::gather, .in = kCount, .out = kBlocksAtRoot, .loads = kOut, .stores = kOut},
    {.collective = Collective::reduce_scatter,
     .in = kBlocks,
     .out = kCount,
     .combines = true,
     .loads = kIn,
     .stores = kIn},
    {.collective = Collective::scatter, .in = kBlocksAtRoot, .out = kCount, .loads = kIn, .stores = kIn},
    {.collective = Collective::all_to_all,
     .in = kBlocks,
     .out = kBlocks,
     .swaps = true,
     .loads = kIn,
     .stores = kOut},
    {.collective = Collective::all_to_all_v, .in = kParts, .out = kParts, .swaps = true},
    {.collective = Collective::send, .in = kCount, .two_ended = true},
    {.collective = Collective::recv, .out = kCount, .two_ended = true},
    {.collective = Collective::send_recv, .in = kCount, .out = kCount, .two_ended = true},
    {.collective = Collective::batch_send_recv, .in = kParts, .out = kParts},
    {.collective = Collective::barrier},
    {.collective = Collective::empty},
    {.collective = Collective::register_memory},
    {.collective = Collective::end_registration},
    // Peers read x, and the results of a row from its owner.
    {.collective = Collective::all_reduce_rms_norm, .loads = kBoth},
};

}  // namespace traits

constexpr const CollectiveTraits& traits_of(Collective collective) {
  return traits::kCollectiveTraits[static_cast<int>(collective)];
}

// Returns whether a collective's direct program only stores to peers, as a NIC does.
constexpr bool stores_only(Collective collective) {
  const Sides sides = traits_of(collective).stores;
  return sides.out && !sides.in;
}

// Returns the collective whose plan rows hold for a call. Both ends of a message have the same rows.
constexpr Collective planned_as(Collective collective) {
  return traits_of(collective).two_ended ? Collective::send_recv : collective;
}

enum class Algorithm : std::uint8_t {
  automatic,
  one_shot_packets,
  one_shot,
  two_shot_packets,
  two_shot,
  reduce_scatter_all_gather,
  push_packets,
  push,
  chain,
  scatter_all_gather,
  two_shot_push,
  two_shot_direct,
  direct,
  one_shot_ll128,
  two_shot_ll128,
  push_ll128,
  copy_engine,
};
inline constexpr int kAlgorithms = 17;

// The ways in which a program's pieces travel.
enum class Pieces : std::uint8_t {
  chunks,
  packets,  // data and flag in one store
  lines,    // of 128 bytes with a flag each, which NVLink carries whole
};

struct AlgorithmTraits {
  Algorithm algorithm;
  std::string_view name;
  bool direct = false;  // reaches into the peers' buffers
  bool shards = false;  // if the call has no blocks, each rank handles a part
  Pieces pieces = Pieces::chunks;
  Algorithm form = Algorithm::automatic;  // the same algorithm over chunks; automatic: itself
};

namespace traits {

// In the order of the enumeration.
inline constexpr AlgorithmTraits kAlgorithmTraits[] = {
    {.algorithm = Algorithm::automatic, .name = "automatic"},
    {.algorithm = Algorithm::one_shot_packets,
     .name = "one_shot_packets",
     .pieces = Pieces::packets,
     .form = Algorithm::one_shot},
    {.algorithm = Algorithm::one_shot, .name = "one_shot"},
    {.algorithm = Algorithm::two_shot_packets,
     .name = "two_shot_packets",
     .shards = true,
     .pieces = Pieces::packets,
     .form = Algorithm::two_shot},
    {.algorithm = Algorithm::two_shot, .name = "two_shot", .shards = true},
    {.algorithm = Algorithm::reduce_scatter_all_gather, .name = "reduce_scatter_all_gather", .shards = true},
    {.algorithm = Algorithm::push_packets,
     .name = "push_packets",
     .pieces = Pieces::packets,
     .form = Algorithm::push},
    {.algorithm = Algorithm::push, .name = "push"},
    {.algorithm = Algorithm::chain, .name = "chain"},
    {.algorithm = Algorithm::scatter_all_gather, .name = "scatter_all_gather", .shards = true},
    {.algorithm = Algorithm::two_shot_push, .name = "two_shot_push", .direct = true, .shards = true},
    {.algorithm = Algorithm::two_shot_direct, .name = "two_shot_direct", .direct = true, .shards = true},
    {.algorithm = Algorithm::direct, .name = "direct", .direct = true, .shards = true},
    {.algorithm = Algorithm::one_shot_ll128,
     .name = "one_shot_ll128",
     .pieces = Pieces::lines,
     .form = Algorithm::one_shot},
    {.algorithm = Algorithm::two_shot_ll128,
     .name = "two_shot_ll128",
     .shards = true,
     .pieces = Pieces::lines,
     .form = Algorithm::two_shot},
    {.algorithm = Algorithm::push_ll128,
     .name = "push_ll128",
     .pieces = Pieces::lines,
     .form = Algorithm::push},
    {.algorithm = Algorithm::copy_engine, .name = "copy_engine", .direct = true, .shards = true},
};

// Returns whether every value of the enumerations has its row.
constexpr bool complete() {
  for (int i = 0; i < kCollectives; ++i)
    if (kCollectiveTraits[i].collective != static_cast<Collective>(i)) return false;
  for (int i = 0; i < kAlgorithms; ++i)
    if (kAlgorithmTraits[i].algorithm != static_cast<Algorithm>(i)) return false;
  return true;
}
static_assert(sizeof kCollectiveTraits / sizeof *kCollectiveTraits == kCollectives &&
                  sizeof kAlgorithmTraits / sizeof *kAlgorithmTraits == kAlgorithms && complete(),
              "give every collective and every algorithm a row, in the order of the enumeration");

}  // namespace traits

constexpr const AlgorithmTraits& traits_of(Algorithm algorithm) {
  return traits::kAlgorithmTraits[static_cast<int>(algorithm)];
}
constexpr Algorithm form_of(Algorithm algorithm) {
  const Algorithm form = traits_of(algorithm).form;
  return form == Algorithm::automatic ? algorithm : form;
}
constexpr std::string_view name_of(Algorithm algorithm) { return traits_of(algorithm).name; }
constexpr bool is_direct(Algorithm algorithm) { return traits_of(algorithm).direct; }
constexpr bool is_packets(Algorithm algorithm) { return traits_of(algorithm).pieces == Pieces::packets; }
constexpr bool is_lines(Algorithm algorithm) { return traits_of(algorithm).pieces == Pieces::lines; }

}  // namespace unisono
