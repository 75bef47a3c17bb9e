// The memory of a Moe on its GPU, and the parameters of its kernels. Plain C++: host and device read it
// alike.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moe/dims.hpp"
#include "moe/memory.hpp"
#include "unisono/device/handle.hpp"

namespace unisono::moe::gpu {

inline constexpr int kMostTopK = 32;               // a warp takes a token's experts at once
inline constexpr int kRouteBlocks = 16;            // of the kernel that reads routes, and have tokens
inline constexpr int kMostChunks = 8;              // of a rank's tokens, in a combine
inline constexpr std::uint32_t kLeastChunk = 128;  // tokens: fewer are one chunk
inline constexpr int kThreads = 512;               // of a block of every kernel
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kPositionBits = 24;  // of a token among those of its rank for another
inline constexpr std::int32_t kNone = -1;
// A dispatch takes the low-latency kernel while it has so many blocks for each token, to expert_major rows or
// to others; then, up to so many tokens of a rank and of each of its blocks, the one that reads the routes
// and sends the rows at once.
inline constexpr std::size_t kBlocksOfToken = 2, kBlocksOfTokenByRank = 32;
inline constexpr std::size_t kTokensAtOnce = 512, kTokensOfBlock = 32;
// A combine takes the low-latency kernel if a rank has so few tokens, and so few rows can be expected, also
// for each of its blocks: with expert_major so many, otherwise the last number.
inline constexpr std::size_t kFewSumsTokens = 128, kFewSums = 256, kFewSumsOfBlock = 4, kRowsOfBlock = 2;

// Sizes of lines (docs/gpu.md), in which the low-latency kernels send rows.
inline constexpr std::size_t kLine = 128;         // bytes
inline constexpr std::size_t kWordsOfLine = 15;   // of 8 bytes, of data
inline constexpr std::size_t kNumbersOfWord = 4;  // that ranks tell
inline constexpr std::size_t kBlocksOfUnit = 15;  // scaled blocks of 128 codes, which are 16 lines
inline constexpr std::size_t kLinesOfUnit = 17;   // of their codes, and of their scales
UNISONO_PORTABLE constexpr std::size_t lines_of(std::size_t bytes) {
  return (bytes + kWordsOfLine * 8 - 1) / (kWordsOfLine * 8);
}
UNISONO_PORTABLE constexpr std::size_t units_of(std::size_t hidden) {
  return (scales::blocks_of(hidden) + kBlocksOfUnit - 1) / kBlocksOfUnit;
}

// Copy engines bring the rows of a call in two steps (dispatch_begin) if a rank has so many tokens, they need
// no sum at their receiver (flat, rank_major), and the host is to know the counts.
inline constexpr std::size_t kManyTokens = 2048;
inline constexpr std::uint32_t kChunksOfCopy = 2;  // that are copied at once

// The signals of an area, one for each source rank and kind. The last two are counted by the hosts. Those of
// kinds `summed` and `few_summed` only name what a rank waits for, in errors.
enum class Told : int { begun, data, summed, taken, few_summed, copied, returned };
inline constexpr int kTold = 7;
UNISONO_PORTABLE constexpr int slot_of(const Dims& dims, Told kind, int source) {
  return static_cast<int>(kind) * dims.ranks + source;
}

// A rank's message of a combine, which is one word of 64 bits.
struct alignas(8) Lent {
  static constexpr std::size_t kUnit = 16;  // bytes
  std::uint32_t chunks;                     // that may be read, in all combines (chunks_told)
  std::uint32_t at;  // where in its area the rank lends its rows, in units; 0: it pushes their sums
};

// Counters of this rank. They lie in the GPU's memory: a graph that is replayed goes on with them.
struct Counters {
  std::uint32_t dispatches;                // that have begun: signals of kind `begun`
  std::uint32_t landed, combines;          // that have ended
  std::uint32_t lent;                      // combines to which this rank has lent rows
  std::uint32_t tickets[2 + kMostChunks];  // of blocks that have ended: the last one goes on
  unsigned long long phases[2];            // low-latency: of dispatches and combines, as Phase counts
};
enum Ticket : int { kEndTicket, kSentTicket, kChunkTicket };  // kChunkTicket: and after, one a chunk

// Returns how many numbers routes count: pairs of each expert, and tokens of each rank and chunk.
UNISONO_PORTABLE constexpr std::size_t columns_of(const Dims& dims, int chunks) {
  return static_cast<std::size_t>(dims.experts) + static_cast<std::size_t>(dims.ranks * chunks);
}

// Offsets in every rank's area. A slot has a routing: first what peers write there, then what is this rank's.
struct Space {
  Space() = default;
  // few_blocks: of a low-latency kernel, for which there is room; 0: there are no such kernels. copies: there
  // is room for the form by copy engines.
  Space(const Dims& dims, std::size_t few_blocks, bool copies);

  // The received rows of an epoch. Payloads after `more` follow each other, each at a multiple of 256 bytes.
  UNISONO_PORTABLE std::size_t x(int epoch) const {
    return pool + static_cast<std::size_t>(epoch) * pool_bytes;
  }
  // What peers have written as lines in a phase: a slot is free in the second phase after it.
  UNISONO_PORTABLE std::size_t told_of(std::uint64_t phase) const { return told + (phase % 2) * told_bytes; }
  UNISONO_PORTABLE std::size_t sent_of(std::uint64_t phase) const { return sent + (phase % 2) * sent_bytes; }
  UNISONO_PORTABLE std::size_t few_sums_of(std::uint64_t phase) const {
    return few_sums + (phase % 2) * few_sums_bytes;
  }
  // Returns how many tokens a chunk has of a rank that has `tokens`: the last ones may be empty.
  UNISONO_PORTABLE std::uint32_t chunk_of(std::uint32_t tokens) const {
    const auto all = static_cast<std::uint32_t>(chunks);
    const std::uint32_t share = (tokens + all - 1) / all;
    return all > 1 && share < kLeastChunk ? kLeastChunk : share;
  }
  std::size_t slot(int number) const { return slots + static_cast<std::size_t>(number) * slot_bytes; }

  int chunks = 1;            // of a rank's tokens
  std::size_t columns = 0;   // that routes count (columns_of)
  std::size_t counters = 0;  // Counters
  std::size_t totals = 0;    // [kRouteBlocks, columns] u64: what each block of the route kernel has counted
  std::size_t slots = 0, slot_bytes = 0;
  std::size_t pool = 0, pool_bytes = 0, scales = 0, more = 0;  // the last two within a pool
  // The rows of each array of a pool. With copy engines, those that have come are followed by rows that wait
  // to be fetched, [ranks, max_tokens] by receiver.
  std::size_t pool_rows = 0, leaving = 0;
  std::size_t sums = 0, sums_bytes = 0;          // twice [ranks, max_tokens, row]: what peers have summed
  std::size_t lent = 0;                          // twice [ranks] Lent: what a peer tells
  std::size_t returned = 0, returned_bytes = 0;  // copy engines (0: never): as sums
  // Low-latency, of at most few_tokens (0: never) of a rank: twice [ranks, told_lines], what peers have
  // counted; twice [ranks, few_tokens, row_lines], their rows; of at most few_sums_tokens twice [ranks,
  // few_sums_tokens, sum_lines], what peers have summed.
  std::size_t few_tokens = 0, few_sums_tokens = 0;
  std::size_t told = 0, told_bytes = 0, told_lines = 0, rank_lines = 0;  // the last: those that tell of ranks
  std::size_t sent = 0, sent_bytes = 0, row_lines = 0;
  std::size_t few_sums = 0, few_sums_bytes = 0, sum_lines = 0;
  // The most tokens of a rank that one kernel dispatches, if they are more than few_tokens; 0: never. It
  // tells counts as the low-latency one does.
  std::size_t at_once_tokens = 0;
  std::size_t bytes = 0;

  // Within a slot.
  std::size_t matrix = 0;       // [ranks, columns]: what every rank has counted
  std::size_t topk_idx = 0;     // flat, rank_major: [rows_held, top_k]
  std::size_t weights = 0;      // [rows_held, top_k], or [rows_held]
  std::size_t pair_rows = 0;    // expert_major: [tokens_held, top_k], the row of each pair of a token
  std::size_t expert_rows = 0;  // flat, rank_major: [pairs_held]
  std::size_t row_expert = 0, counts = 0, offsets = 0, source_rows = 0, rows = 0, dropped = 0;
  std::size_t first_rows = 0;   // [ranks]: the first row of each source's tokens here
  std::size_t first_there = 0;  // [ranks]: the first row of this rank's tokens there
  std::size_t experts = 0;      // [max_tokens, top_k]: this rank's topk_idx
  std::size_t places = 0;  // [max_tokens, top_k]: each pair's row at its rank; flat, rank_major: its place in
                           // expert_rows there
  std::size_t weighted = 0;  // [ranks]: whether that rank's tokens have come with weights
  std::size_t homes = 0;     // [max_tokens, top_k]: rank and position of each copy of a token, by rank
};

// The parameter of every kernel of a call. Fields that all of them read come first, close together.
struct Work {
  byte* own = nullptr;                     // this rank's area
  const device::Status* status = nullptr;  // this rank's
  std::size_t slot = 0;                    // its offset
  std::uint32_t tokens = 0;                // of this rank
  int epoch = 0;
  Dims dims;
  Space space;
  device::Handle area;
};

// Rows that travel: from here, to an array in every rank's area.
struct Payload {
  const byte* from = nullptr;
  std::size_t to = 0;
  std::uint32_t bytes = 0;  // of a row
  int word = 1;             // bytes of the widest word by which rows can be copied
};

struct Payloads {
  int count = 0;
  Payload of[kMostMore + 1];  // x first; with scales `bytes` and `word` are those of its codes
};

struct Dispatch {
  Payloads payloads;
  std::uint32_t first = 0, tokens = 0;  // that the launch sends, of the call's
  bool copies = false;                  // copy engines bring rows to the peers
  std::uint32_t copied = 0;             // signals of kind `copied`, when all rows have come
  bool routed = false;                  // the slot has the routing already
  bool lands = false;                   // the kernel that sends also waits for the peers' rows
  bool sends = true;                    // low-latency: the kernel sends, and does not only land
  bool wide = false;                    // with scales: x can be read by words of 16 bytes
  bool wide_index = false;              // topk_idx is of 64 bits
  const void* topk_idx = nullptr;       // low-latency: [tokens, top_k]
  bool bulk = false;                    // rows of x go by bulk copies
  const float* weights = nullptr;       // [tokens, top_k], or null
  byte* out = nullptr;                  // to which rows of x are copied in the end, or null
};

struct Combine {
  const byte* y = nullptr;
  const byte* bias = nullptr;
  const float* weights = nullptr;  // expert_major: of rows of y; null: those that have come, if any
  byte* out = nullptr;
  std::uint32_t bytes = 0, lines = 0;  // of a row
  DType dtype = DType::bf16;
  bool wide = false;               // rows can be read and written by words of 16 bytes
  bool push = false, sum = false;  // the steps that the kernel makes
  bool lends = false;              // y lies in this rank's area: peers read its rows there
  bool one_chunk = false;          // the dispatch that set the routing has counted no chunks
  std::size_t returned = 0;        // where copy engines bring the peers' rows; 0: the peers push or lend them
  std::uint32_t chunks_before = 0;  // signals of kind `returned` before this combine's
};

// A kernel's reason why a call cannot be, in device::Failure::problem.
enum class Problem : std::uint32_t { none, index, capacity };

}  // namespace unisono::moe::gpu
