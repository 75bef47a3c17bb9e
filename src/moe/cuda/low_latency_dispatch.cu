// Dispatch of few tokens, in one kernel. A rank stores rows as lines into its slots at their receivers,
// before it knows where they belong. The receivers learn that from what all ranks tell, and copy the lines
// there.
#include <cuda_runtime.h>

#include "cuda/api.hpp"
#include "moe/cuda/fill.cuh"
#include "moe/cuda/launch.hpp"
#include "moe/cuda/low_latency_send.cuh"

namespace unisono::moe::gpu {
namespace {

// A row that comes: the position-th of its source. token: of this rank's own rows, which take no lines.
struct Incoming {
  byte* lines;
  unsigned token;
  std::uint64_t phase;
  int source;
  unsigned position;
};

// The share of a warp in the rows that come. With expert_major, and by a kept routing, it copies rows and
// sets their tables. Otherwise a row's place follows from the ranks' numbers of tokens alone: most blocks
// copy rows, and the last eighth finds out where pairs go.
struct Role {
  __device__ Role(const Dims& dims, const Dispatch& dispatch) : warp(spread_warp()), warps(warps_of_grid()) {
    const unsigned setters = gridDim.x / 8, copiers = gridDim.x - setters;
    if (setters == 0 || dims.expert_major() || dispatch.routed) return;
    first_setter = copiers;
    copies = blockIdx.x < copiers;
    sets = !copies;
    warps = (copies ? copiers : setters) * kWarps;
    warp = copies ? spread_warp(blockIdx.x, copiers) : spread_warp(blockIdx.x - copiers, setters);
  }
  unsigned warp, warps;       // this warp's number, and how many share the role
  unsigned first_setter = 0;  // block
  bool copies = true, sets = true;
};

// Copies a segment of lines, from `first_line` on, to the targets.
template <bool kWide>
__device__ bool land_lines(const Work& work, const Incoming& row, unsigned first_line, unsigned count,
                           const Payload& payload, const Targets& targets, int targets_count,
                           unsigned segment, const Segments& share) {
  const int grain = kWide ? 16 : payload.word;
  constexpr int kAtOnce = kStepsAtOnce<kWide>;
  const Steps part(count, kLinesOfWarp, segment, share);
  for (unsigned first = part.first; first < part.end; first += kAtOnce) {
    Packet* places[kAtOnce];
    Packet packets[kAtOnce];
#pragma unroll
    for (unsigned u = 0; u < kAtOnce; ++u) {
      const unsigned line = line_of(first + u);
      const bool has = first + u < part.end && line < count;
      places[u] = has ? packet_of(row.lines, first_line + line) : nullptr;
    }
    if (!take_lines(work, places, row.phase, Told::data, row.source, packets)) return false;
    for (int t = 0; t < targets_count; ++t) {
#pragma unroll
      for (unsigned u = 0; u < kAtOnce; ++u) {
        if (!places[u]) continue;
        const unsigned w = word_of(line_of(first + u));
        store_word(targets.at[t], w, payload.bytes, grain, packets[u].low);
        if (!ends_line()) store_word(targets.at[t], w + 1, payload.bytes, grain, packets[u].high);
      }
    }
  }
  return true;
}

// The same for x that was quantised.
template <MoeScales kScales>
__device__ bool land_units(const Work& work, const Incoming& row, unsigned first_line, const Payload& x,
                           const Targets& targets, int targets_count, unsigned segment,
                           const Segments& share) {
  const Dims& d = work.dims;
  const std::size_t scales_array = work.space.x(work.epoch) + work.space.scales;
  const std::size_t blocks = scales::blocks_of(d.hidden);
  const Steps part(static_cast<unsigned>(units_of(d.hidden)), 1, segment, share);
  for (unsigned unit = part.first; unit < part.end; ++unit) {
    const unsigned first_word = unit * static_cast<unsigned>(kBlocksOfUnit * kScaleBlock / 8);
    byte* const lines = row.lines + (first_line + unit * kLinesOfUnit) * kLine;
    Packet* places[kStepsOfUnit + 1];
    Packet packets[kStepsOfUnit + 1];
#pragma unroll
    for (int u = 0; u < kStepsOfUnit; ++u) places[u] = packet_of(lines, line_of(u));
    places[kStepsOfUnit] = lane() < kLanesOfLine ? packet_of(lines, kLinesOfUnit - 1) : nullptr;
    if (!take_lines(work, places, row.phase, Told::data, row.source, packets)) return false;
    for (int t = 0; t < targets_count; ++t) {
#pragma unroll
      for (int u = 0; u < kStepsOfUnit; ++u) {
        const unsigned w = first_word + word_of(line_of(u));
        store_word(targets.at[t], w, x.bytes, x.word, packets[u].low);
        if (!ends_line()) store_word(targets.at[t], w + 1, x.bytes, x.word, packets[u].high);
      }
      byte* const its = scales_at(work, targets.of[t], scales_array);
#pragma unroll
      for (unsigned n = 0; n < 4; ++n) {
        const unsigned number = lane() * 4 + n;
        const std::size_t block = unit * kBlocksOfUnit + number;
        if (number >= kBlocksOfUnit || block >= blocks) continue;
        const Packet& packet = packets[kStepsOfUnit];
        const auto value = static_cast<std::uint32_t>((n < 2 ? packet.low : packet.high) >> n % 2 * 32);
        if constexpr (kScales == MoeScales::mx) its[block] = static_cast<byte>(value);
        else reinterpret_cast<std::uint32_t*>(its)[block] = value;
      }
    }
  }
  if (kScales == MoeScales::mx && segment == 0)  // zeros fill up the scales of a row
    for (std::size_t i = blocks + lane(); i < d.scale_bytes; i += 32)
      for (int t = 0; t < targets_count; ++t) scales_at(work, targets.of[t], scales_array)[i] = byte{0};
  return true;
}

// Lists where a row goes, and sets what its tables say of it if `sets`. Returns the number of its places, or
// -1 if the wait for its pairs has failed.
__device__ int find_places(const Work& work, const Dispatch& dispatch, const Few& few, const Incoming& row,
                           Targets& targets, bool sets) {
  const Dims& d = work.dims;
  const auto k = static_cast<unsigned>(d.top_k);
  const bool weighted = few.weighted[row.source] != 0, pairs = !dispatch.routed || weighted;
  const bool reads = pairs && (sets || (d.expert_major() && !dispatch.routed));
  const auto first = static_cast<std::int32_t>(few.sources.first_rows[row.source] + row.position);
  if (!d.expert_major()) {
    if (lane() == 0) targets.of[0] = {d.rank, first};
    if (!reads) return 1;
  }
  std::uint64_t entry = 0;
  if (reads && row.source == d.rank) {
    entry = pair_word(work, dispatch, few, row.token, lane());
  } else if (reads) {
    const unsigned line = line_of(0);
    Packet* const places[1] = {line < pair_lines(d) ? packet_of(row.lines, line) : nullptr};
    Packet packets[1] = {};
    if (!take_lines(work, places, row.phase, Told::data, row.source, packets)) return -1;
    const unsigned number = min(lane(), k - 1), word = number % kWordsOfLine;
    const int from = static_cast<int>(number / kWordsOfLine * kLanesOfLine + word / 2);
    const std::uint64_t low = __shfl_sync(kAllLanes, packets[0].low, from);
    const std::uint64_t high = __shfl_sync(kAllLanes, packets[0].high, from);
    entry = word % 2 == 0 ? low : high;
  }
  const auto pair = static_cast<std::uint32_t>(entry);
  const float weight = numeric::as_float(static_cast<std::uint32_t>(entry >> 32));
  const int expert = static_cast<int>(pair >> 16) - d.first_expert();
  const bool here =
      lane() < k && !dispatch.routed && pair != kMasked && expert >= 0 && expert < d.local_experts;
  const std::uint32_t place = here ? few.starts[row.source * d.local_experts + expert] + (pair & 0xffffu) : 0;
  if (!d.expert_major()) {
    if (lane() >= k) return 1;
    const std::size_t i = static_cast<std::size_t>(first) * k + lane();
    std::int32_t* const its = table<std::int32_t>(work, work.space.topk_idx) + i;
    if (!dispatch.routed) *its = here ? expert : kNone;
    if (here && !d.drop)  // otherwise rows are sorted
      table<std::int32_t>(work, work.space.expert_rows)[place] = first;
    if (weighted) table<float>(work, work.space.weights)[i] = *its != kNone ? weight : 0.0f;
    return 1;
  }
  std::int32_t* const its = table<std::int32_t>(work, work.space.pair_rows) +
                            (row.source * d.max_tokens + row.position) * k + lane();
  std::int32_t to = kNone;
  if (dispatch.routed && lane() < k) to = *its;
  if (here && place < d.capacity) to = static_cast<std::int32_t>(place);
  if (sets && !dispatch.routed && lane() < k) *its = to;
  if (sets && weighted && to != kNone) table<float>(work, work.space.weights)[to] = weight;
  const unsigned all = __ballot_sync(kAllLanes, to != kNone);
  if (to != kNone) targets.of[before(all)] = {d.rank, to};
  return __popc(all);
}

template <class T, MoeScales kScales, bool kWide>
__device__ bool land_row(const Work& work, const Dispatch& dispatch, const Few& few, const Role& role,
                         const Incoming& row, Targets& targets, unsigned segment, const Segments& share) {
  const Dims& d = work.dims;
  __syncwarp();
  const int count = find_places(work, dispatch, few, row, targets, role.sets && segment == 0);
  __syncwarp();
  if (count < 0) return false;
  if (!role.copies) return true;
  unsigned line = pair_lines(d);
  for (int p = 0; p < dispatch.payloads.count; ++p) {
    const Payload& payload = dispatch.payloads.of[p];
    const bool quantised = kScales != MoeScales::none && p == 0;
    aim(work, targets, count, payload.to, payload.bytes);
    if (row.source == d.rank) {
      if constexpr (kScales != MoeScales::none)
        if (quantised)
          quantise_row<T, kScales>(work, payload.from + row.token * d.row_bytes, targets, count,
                                   work.space.x(work.epoch) + work.space.scales, dispatch.wide, segment,
                                   share);
      if (!quantised)
        copy_row(payload.from + std::size_t{row.token} * payload.bytes, targets.at, count, payload.bytes,
                 kWide ? 16 : payload.word, segment, share);
    } else if (quantised) {
      if (!land_units<kScales>(work, row, line, payload, targets, count, segment, share)) return false;
      line += unit_lines(d);
    } else {
      const unsigned lines = payload_lines(dispatch, p);
      if (!land_lines<kWide>(work, row, line, lines, payload, targets, count, segment, share)) return false;
      line += lines;
    }
  }
  return true;
}

template <class T, MoeScales kScales, bool kWide>
__device__ bool land_rows(const Work& work, const Dispatch& dispatch, const Few& few, const Role& role,
                          Targets& targets, std::uint64_t phase) {
  const Dims& d = work.dims;
  unsigned rows = 0;
#pragma unroll 1
  for (int s = 0; s < d.ranks; ++s) rows += few.sources.rows[s];
  const Segments share(rows, role.copies ? role.warps : rows);
  for (unsigned item = role.warp; item < share.items; item += role.warps) {
    const RowOf which(few.sources.rows, d.ranks, d.rank == 0 ? d.ranks - 1 : d.rank - 1, share.row_of(item));
    const Incoming row{
        .lines = mine<byte>(work, work.space.sent_of(phase)) +
                 (which.source * work.space.few_tokens + which.position) * work.space.row_lines * kLine,
        .token = which.source == d.rank ? few.own[which.position] : 0,
        .phase = phase,
        .source = which.source,
        .position = which.position};
    if (!land_row<T, kScales, kWide>(work, dispatch, few, role, row, targets, share.segment_of(item), share))
      return false;
  }
  return true;
}

// kWide: rows are copied by words of 8 bytes.
template <class T, MoeScales kScales, bool kWide>
__global__ void __launch_bounds__(kThreads)
    low_latency_dispatch_kernel(const __grid_constant__ Work work, const __grid_constant__ Dispatch dispatch,
                                const __grid_constant__ Shares shares) {
  extern __shared__ std::uint64_t memory[];
  __shared__ Targets all_targets[kWarps];
  __shared__ Rooms rooms;
  const Few few(work, memory, work.space.few_tokens);
  const Rounds rounds(work, shares);
  const Entry loaded = dispatch.routed ? Entry() : rounds.load(dispatch, rounds.first);
  const Phase phase_to_come(counters(work).phases, dispatch.sends);
  if (threadIdx.x == 0) few.number(0) = dispatch.weights ? 1 : 0;
  if (dispatch.routed) {
    load_few(work, few);
    if (failed(work)) return;
  } else if (!count_routes(work, shares, dispatch, few, rounds, loaded)) {
    return;
  }
  const std::uint64_t phase = phase_to_come.number();
  const Lines lines = lines_to_tell(work, dispatch);
  if (dispatch.sends) tell_few(work, few, phase, lines, blockIdx.x, gridDim.x);
  if (!dispatch.routed) {
    place_pairs(work, few, rounds);
    __syncthreads();
  }
  if (dispatch.sends) {
    const Segments share(work.tokens);
    // From the last warp on: the first ones tell.
    for (unsigned item = warps_of_grid() - 1 - spread_warp(); item < share.items; item += warps_of_grid())
      send_row<T, kScales, kWide>(work, dispatch, few, share.row_of(item), share.segment_of(item), share,
                                  phase);
  }
  if (!dispatch.lands || !hear_few(work, dispatch, few, phase, lines.end)) return;
  const Role role(work.dims, dispatch);
  if (!dispatch.routed && role.sets) {
    if (!lay_out_few(work, few, rooms)) return;
    find_starts(work, few);
    if (blockIdx.x == role.first_setter) keep_homes(work, few, rooms);
  }
  __syncthreads();
  const bool landed =
      land_rows<T, kScales, kWide>(work, dispatch, few, role, all_targets[warp_of_block()], phase);
  if (__syncthreads_and(landed) == 0) return;
  if (!dispatch.routed || dispatch.weights) fill_tables(work, dispatch, few.sources.rows);
  clear_gaps(work, dispatch);
}

const void* kernel_of(const Dims& dims, bool wide) {
  return by_form(dims, [&]<class T, MoeScales kScales>(Form<T, kScales>) {
    constexpr bool kBytes = kScales == MoeScales::none;
    return kBytes && wide ? reinterpret_cast<const void*>(low_latency_dispatch_kernel<T, kScales, kBytes>)
                          : reinterpret_cast<const void*>(low_latency_dispatch_kernel<T, kScales, false>);
  });
}

}  // namespace

std::size_t low_latency_shared_bytes(const Dims& dims, const Space& space) {
  return Few::bytes(dims, space, space.few_tokens) + kWarps * sizeof(Targets) + sizeof(Rooms) + 2048;
}

void load_low_latency_dispatch(const Dims& dims) {
  for (const bool wide : {false, true}) cuda::load_with_shared(kernel_of(dims, wide));
}

cudaError_t low_latency_dispatch(const Work& work, const Dispatch& dispatch, int blocks,
                                 cudaStream_t stream) {
  bool wide = true;
  for (int p = 0; p < dispatch.payloads.count; ++p) wide = wide && dispatch.payloads.of[p].word == 16;
  Shares shares(work.dims);
  void* parameters[] = {const_cast<Work*>(&work), const_cast<Dispatch*>(&dispatch), &shares};
  return cudaLaunchKernel(kernel_of(work.dims, wide), dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
                          parameters, Few::bytes(work.dims, work.space, work.space.few_tokens), stream);
}

}  // namespace unisono::moe::gpu
