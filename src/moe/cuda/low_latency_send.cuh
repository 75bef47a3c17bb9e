// Rows of few tokens on their way out, as lines.
#pragma once

#include "moe/cuda/low_latency_route.cuh"
#include "moe/cuda/rows.cuh"

namespace unisono::moe::gpu {

// The lines of a slot, in order: those of the pairs (of words: expert and weight), of x, and of each further
// payload.
__device__ inline unsigned pair_lines(const Dims& d) {
  return static_cast<unsigned>(lines_of(8 * static_cast<std::size_t>(d.top_k)));
}
__device__ inline unsigned payload_lines(const Dispatch& dispatch, int p) {
  return static_cast<unsigned>(lines_of(dispatch.payloads.of[p].bytes));
}
__device__ inline unsigned unit_lines(const Dims& d) {
  return static_cast<unsigned>(units_of(d.hidden) * kLinesOfUnit);
}

// A warp's row on its way to other ranks: lane h has the slot of the row's h-th copy, if that is not here.
struct Outgoing {
  __device__ Outgoing(const Work& work, const Few& few, unsigned token, std::uint64_t phase) : phase(phase) {
    const auto k = static_cast<unsigned>(work.dims.top_k);
    const std::int32_t packed = lane() < k ? few.homes[std::size_t{token} * k + lane()] : kNone;
    const Home home(packed);
    const bool leaves = packed != kNone && home.rank != work.dims.rank;
    if (leaves)
      slot = at<byte>(work, home.rank, work.space.sent_of(phase)) +
             (work.dims.rank * work.space.few_tokens + static_cast<std::size_t>(home.position)) *
                 work.space.row_lines * kLine;
    copies = __ballot_sync(kAllLanes, leaves);
  }
  // Stores this lane's parts of lines to all copies. there(u): whether the line exists.
  template <int kCount, class There>
  __device__ inline void store(const unsigned (&lines)[kCount], const Packet (&packets)[kCount],
                               const There& there) const {
    __syncwarp();
    for (unsigned left = copies; left != 0; left &= left - 1) {
      auto* const to = reinterpret_cast<byte*>(__shfl_sync(
          kAllLanes, reinterpret_cast<unsigned long long>(slot), __ffs(static_cast<int>(left)) - 1));
#pragma unroll
      for (int u = 0; u < kCount; ++u)
        if (there(u)) cuda::store_packet(packet_of(to, lines[u]), packets[u]);
    }
  }
  std::uint64_t phase;
  byte* slot = nullptr;
  unsigned copies;
};

// Sends a segment of lines, of which `word` gives the words.
template <int kAtOnce, class Word>
__device__ inline void send_lines(const Outgoing& row, unsigned first_line, unsigned count, unsigned segment,
                                  const Segments& share, const Word& word) {
  const Steps part(count, kLinesOfWarp, segment, share);
  for (unsigned first = part.first; first < part.end; first += kAtOnce) {
    const auto has = [&](unsigned u) { return first + u < part.end && line_of(first + u) < count; };
    unsigned lines[kAtOnce];
    Packet packets[kAtOnce] = {};
#pragma unroll
    for (unsigned u = 0; u < kAtOnce; ++u) {
      const unsigned line = line_of(first + u), w = word_of(line);
      lines[u] = first_line + line;
      if (has(u)) packets[u] = {word(w), ends_line() ? row.phase : word(w + 1)};
    }
    row.store(lines, packets, has);
  }
}

// Returns a pair of a token as a word: its expert and number, and its weight.
__device__ inline std::uint64_t pair_word(const Work& work, const Dispatch& dispatch, const Few& few,
                                          unsigned token, unsigned i) {
  if (i >= static_cast<unsigned>(work.dims.top_k)) return 0;
  const std::size_t pair = std::size_t{token} * work.dims.top_k + i;
  const float weight = dispatch.weights ? dispatch.weights[pair] : 0.0f;
  return few.pairs[pair] | std::uint64_t{numeric::as_bits(weight)} << 32;
}

__device__ inline void send_pairs(const Work& work, const Dispatch& dispatch, const Few& few,
                                  const Outgoing& row, unsigned token) {
  const unsigned lines[1] = {line_of(0)}, w = word_of(lines[0]);
  const std::uint64_t high = pair_word(work, dispatch, few, token, w + 1);
  const Packet packets[1] = {{pair_word(work, dispatch, few, token, w), ends_line() ? row.phase : high}};
  row.store(lines, packets, [&](int) { return lines[0] < pair_lines(work.dims); });
}

// Returns the largest magnitude of a block of 128 elements, alike to the warp.
template <class T>
__device__ inline std::uint32_t largest_of_block(const byte* x, std::size_t block, std::size_t hidden,
                                                 bool wide) {
  std::uint32_t largest = 0;
  if (wide) {
    const std::size_t i = block * kScaleBlock + lane() * 4;
    if (i < hidden) largest = largest_of(*reinterpret_cast<const Pack<T, 4>*>(x + i * sizeof(T)));
  } else {
#pragma unroll
    for (unsigned e = 0; e < 4; ++e)
      if (const std::size_t i = block * kScaleBlock + lane() + 32 * e; i < hidden)
        largest =
            max(largest, numeric::as_bits(Wide<T>::from(reinterpret_cast<const T*>(x)[i])) & 0x7fffffffu);
  }
  return __reduce_max_sync(kAllLanes, largest);
}

// Returns the codes of eight elements, from i on; of those behind the row's end zeros.
template <class T>
__device__ inline std::uint64_t codes_of_word(const byte* x, std::size_t i, std::size_t hidden, bool wide,
                                              float inverse) {
  float values[8];
  constexpr int kEach = static_cast<int>(sizeof(uint4) / sizeof(T));
#pragma unroll
  for (int first = 0; first < 8; first += kEach) {
    Pack<T, kEach> pack{};
    if (wide && i + first < hidden)
      pack = *reinterpret_cast<const Pack<T, kEach>*>(x + (i + first) * sizeof(T));
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      values[first + e] = Wide<T>::from(pack.get(e));
      if (!wide && i + first + e < hidden)
        values[first + e] = Wide<T>::from(reinterpret_cast<const T*>(x)[i + first + e]);
    }
  }
  std::uint64_t codes = 0;
#pragma unroll
  for (int e = 0; e < 8; e += 2) codes |= std::uint64_t{codes_of(values[e], values[e + 1], inverse)} << 8 * e;
  return codes;
}

// Sends a segment of x, quantised: lane b has the scale of a unit's b-th block.
template <class T, MoeScales kScales>
__device__ inline void send_units(const Outgoing& row, unsigned first_line, const byte* x, std::size_t hidden,
                                  bool wide, unsigned segment, const Segments& share) {
  const Steps part(static_cast<unsigned>(units_of(hidden)), 1, segment, share);
  for (unsigned unit = part.first; unit < part.end; ++unit) {
    const std::size_t first_block = unit * kBlocksOfUnit;
    const unsigned first = first_line + unit * static_cast<unsigned>(kLinesOfUnit);
    std::uint32_t largest = 0;
#pragma unroll 5
    for (unsigned b = 0; b < kBlocksOfUnit; ++b) {
      const std::uint32_t its = largest_of_block<T>(x, first_block + b, hidden, wide);
      if (lane() == b) largest = its;
    }
    const Scale<kScales> scale(largest);
    unsigned lines[kStepsOfUnit + 1];
    Packet packets[kStepsOfUnit + 1];
    const auto word = [&](unsigned w) {
      const int block = static_cast<int>(w * 8 / kScaleBlock);
      const float inverse = __shfl_sync(kAllLanes, scale.inverse, block);
      return codes_of_word<T>(x, first_block * kScaleBlock + w * 8, hidden, wide, inverse);
    };
#pragma unroll
    for (int u = 0; u < kStepsOfUnit; ++u) {
      lines[u] = first + line_of(u);
      const unsigned w = word_of(line_of(u));
      packets[u].low = word(w);
      packets[u].high = word(w + 1);
      if (ends_line()) packets[u].high = row.phase;
    }
    const auto two_scales = [&](unsigned number) {
      const std::uint64_t low = __shfl_sync(kAllLanes, scale.value, static_cast<int>(number % 32));
      return low | std::uint64_t{__shfl_sync(kAllLanes, scale.value, static_cast<int>((number + 1) % 32))}
                       << 32;
    };
    lines[kStepsOfUnit] = first + kLinesOfUnit - 1;
    packets[kStepsOfUnit] = {two_scales(lane() * 4), two_scales(lane() * 4 + 2)};
    if (ends_line()) packets[kStepsOfUnit].high = row.phase;
    row.store(lines, packets, [](int u) { return u < kStepsOfUnit || lane() < kLanesOfLine; });
  }
}

template <class T, MoeScales kScales, bool kWide>
__device__ inline void send_row(const Work& work, const Dispatch& dispatch, const Few& few, unsigned token,
                                unsigned segment, const Segments& share, std::uint64_t phase) {
  const Dims& d = work.dims;
  const Outgoing row(work, few, token, phase);
  if (row.copies == 0) return;
  unsigned line = 0;
  if (segment == 0 && (!dispatch.routed || dispatch.weights)) send_pairs(work, dispatch, few, row, token);
  line += pair_lines(d);
  for (int p = 0; p < dispatch.payloads.count; ++p) {
    const Payload& payload = dispatch.payloads.of[p];
    if (kScales != MoeScales::none && p == 0) {
      send_units<T, kScales>(row, line, payload.from + token * d.row_bytes, d.hidden, dispatch.wide, segment,
                             share);
      line += unit_lines(d);
    } else {
      const byte* const from = payload.from + std::size_t{token} * payload.bytes;
      send_lines<kStepsAtOnce<kWide>>(row, line, payload_lines(dispatch, p), segment, share, [&](unsigned w) {
        return load_word(from, w, payload.bytes, kWide ? 16 : payload.word);
      });
      line += payload_lines(dispatch, p);
    }
  }
}

}  // namespace unisono::moe::gpu
