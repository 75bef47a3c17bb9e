// What the host prepares for the CUDA lane, and what its blocks leave behind. Plain C++: host and device read
// it alike.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/plan.hpp"
#include "lane/lane.hpp"
#include "unisono/device/handle.hpp"
#include "unisono/types.hpp"

namespace unisono::cuda {

inline constexpr int kMaxRanks = device::kMostRanks;  // of one NVLink domain of one machine
// The ranks up to which there are exchanges and copies by engines. The kernels of programs come in two forms:
// for so few ranks, whose peers fit into one warp and into registers, and for all.
inline constexpr int kFewRanks = 8;
// Whether an algorithm runs on more than kFewRanks ranks: the portable programs do.
constexpr bool runs_on_many(Algorithm algorithm) {
  return traits_of(algorithm).pieces == Pieces::chunks && algorithm != Algorithm::copy_engine;
}
// Of a block; blocks are whole warps, in one dimension.
inline constexpr int kMaxThreads = Shape::kMostThreads;
inline constexpr std::uint32_t kChunks = 4;             // chunks in the ring of a pair of blocks
inline constexpr std::uint32_t kPackets = kMaxThreads;  // of a message of a block: one for each thread
inline constexpr std::uint32_t kTurns = 4;      // messages between a pair of blocks that may be on their way
inline constexpr std::size_t kPacketBytes = 8;  // payload of a packet
inline constexpr std::size_t kLineUnits = 8;    // of a packet's size, in a line of 128 bytes
inline constexpr std::size_t kLineBytes = 120;  // payload of a line
inline constexpr std::size_t kLineUnit = kLineBytes / kLineUnits;  // of a thread, on average

// Data and flag in two words of 64 bits, each of which is read and written whole: low half data, high half
// the number of the message.
struct alignas(16) Packet {
  std::uint64_t low, high;
};
static_assert(sizeof(Packet) == 2 * kPacketBytes);

// A word that one block of a peer writes and one block of mine polls, in a sector of its own; and what comes
// with it, if anything.
struct alignas(32) Flag {
  std::uint32_t count;
  byte* address;
};

// Of the messages of packets or lines that a block has had with each peer: what the block counts (`counts`),
// and what each peer has begun (`tokens`, written by the peers).
struct alignas(32) Counts {
  std::uint32_t of[kFewRanks];
};

// How far a block is with one peer. It lives in the scratch between kernels, so that a CUDA graph can be
// replayed.
struct alignas(16) Counters {
  std::uint32_t signalled[kSlots], awaited[kSlots];
};

// The head of each rank's scratch. Any rank sets `failed` on all, and the host does if it loses a peer. Waits
// then end and moves are left out, also in later kernels. What copy engines do behind such a kernel is not
// left out, nor what an exchange takes that has come.
using Header = device::Status;
using Failure = device::Failure;

// A rank's scratch: memory of `bytes` bytes, zeroed once, that every rank has mapped: on its GPU, or of the
// host where GPUs do not reach each other. The last two parts are the rank's own. The same on every rank.
struct Layout {
  Layout() = default;
  constexpr Layout(int n, int most_blocks, std::size_t chunk)
      : ranks(n), blocks(most_blocks), chunk_bytes(round_up(chunk, kAlign)) {
    const auto pairs = static_cast<std::size_t>(n) * static_cast<std::size_t>(most_blocks);
    flags = round_up(sizeof(Header), 256);
    packets = round_up(flags + pairs * kSlots * sizeof(Flag), 256);
    // of two steps
    const std::size_t rings = n > kFewRanks ? 0 : pairs * 2 * kTurns * kPackets * sizeof(Packet);
    lines = round_up(packets + rings, 256);
    tokens = round_up(lines + rings, 256);
    chunks = round_up(tokens + static_cast<std::size_t>(blocks) * sizeof(Counts), 256);
    counters = round_up(chunks + pairs * kChunks * chunk_bytes, 256);
    counts = round_up(counters + pairs * sizeof(Counters), 256);
    bytes = round_up(counts + static_cast<std::size_t>(blocks) * sizeof(Counts), 256);
  }
  int ranks = 0, blocks = 0;  // the most blocks that a kernel may have
  std::size_t chunk_bytes = 0;
  std::size_t flags = 0, packets = 0, lines = 0, tokens = 0, chunks = 0, counters = 0, counts = 0,
              bytes = 0;  // offsets, and the whole
};

// Where a kernel runs. Every rank launches one of the same program with the same grid (of at most
// layout.blocks, all resident at once), block and tile; one kernel of a scratch at a time.
template <int kMost>
struct ContextOf {
  int rank = 0;
  Layout layout;
  byte* bases[kMost] = {};                      // every rank's scratch, as this device has it mapped
  Failure* failure = nullptr;                   // this rank's, as the device has it mapped
  std::uint64_t timeout_ns = 0;                 // deadline of every wait
  bool counts_up = false;                       // a peer's counter, by an atomic operation
  std::size_t piece_bytes = 0;                  // what a block takes up at once; a multiple of kAlign
  Collective collective = Collective::barrier;  // for the record of a failure
  std::uint64_t call = 0;
};
using Context = ContextOf<kFewRanks>;

// The one parameter of a program's kernel, of at most kMost ranks.
template <int kMost>
struct LaunchOf {
  ContextOf<kMost> context;
  DType dtype = DType::f32;  // of what the program combines
  Op op = Op::sum;
  Args args;  // its arrays are taken from here:
  const byte* inputs[kMost] = {};
  byte* outputs[kMost] = {};
  bool by_parts = false;  // all_to_all_v, batch_send_recv; and what copy engines leave to a kernel
  Args::Part sends[kMost], receives[kMost];
  int to = 0, from = 0;  // send_recv; 0 bytes leave that half out
  std::size_t sent = 0, received = 0;
  byte* mine = nullptr;  // the output as `from` reaches it, or null
};
using Launch = LaunchOf<kFewRanks>;
static_assert(sizeof(Launch) <= 4096);
static_assert(sizeof(LaunchOf<kMaxRanks>) <= 32764);  // from sm_70 and CUDA 12.1 on

}  // namespace unisono::cuda
