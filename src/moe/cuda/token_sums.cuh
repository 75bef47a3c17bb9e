// The sum of a token in a combine: of what this rank has of it, and of the parts of all ranks.
#pragma once

#include "moe/cuda/lent.cuh"
#include "moe/cuda/sums.cuh"

namespace unisono::moe::gpu {
namespace {

// The rows that a rank has of a token: one, which the caller has summed (flat, rank_major); those of its
// pairs (expert_major); or all there are, since there is one rank.
enum class Has { row, pairs, all };

template <class T, int kEach>
__device__ inline Pack<T, kEach> load(const byte* row, std::size_t i) {
  return reinterpret_cast<const Pack<T, kEach>*>(row)[i];
}

// Sets this rank's part of a token, from vector i on in steps of a warp: the sum of its rows, weighted or
// not. A row alone without a weight keeps its bits.
template <class T, int kEach, int kColumns>
__device__ inline void weigh(const Rows& rows, int count, bool weighted, unsigned i, unsigned end,
                             Pack<T, kEach> (&out)[kColumns]) {
  constexpr int kAhead = 4;  // rows that are loaded before the first is added
  using Vector = Pack<T, kEach>;
  const auto read = [&](int row, Vector(&to)[kColumns]) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (i + 32 * c < end) to[c] = load<T, kEach>(rows.at[row], i + 32 * c);
  };
#pragma unroll
  for (int c = 0; c < kColumns; ++c) out[c] = {};
  if (count == 1 && !weighted) return read(0, out);
  if (count == 0) return;
  Sum<T, kEach> sums[kColumns];
  for (int first = 0; first < count; first += kAhead) {
    Vector some[kAhead][kColumns];
#pragma unroll
    for (int u = 0; u < kAhead; ++u)
      if (first + u < count) read(first + u, some[u]);
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (first + u >= count) continue;
      const float weight = rows.weights[first + u];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (weighted) sums[c].add(some[u][c], weight);
        else sums[c].add(some[u][c]);
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) out[c] = sums[c].rounded();
}

// The vectors of a row that a warp has: `first` is that of its first lane.
template <class T, int kEach>
struct Vectors {
  __device__ Vectors(const Combine& combine, unsigned segment, const Segments& share) {
    const unsigned all = combine.bytes / static_cast<unsigned>(sizeof(Pack<T, kEach>));
    const Steps part(all, 32, segment, share);
    first = part.first * 32;
    end = min(part.end * 32, all);
  }
  unsigned first, end;
};

// Copies a segment of a row.
template <class T, int kEach>
__device__ inline void copy_part(const Combine& combine, const byte* from, byte* to, unsigned segment,
                                 const Segments& share) {
  copy_row(from, &to, 1, combine.bytes, kEach > 1 ? 16 : static_cast<int>(sizeof(T)), segment, share);
}

// Writes a segment of this rank's part of a token, with a bias or none.
template <class T, int kEach>
__device__ void combine_rows(const Combine& combine, const Rows& rows, int count, bool weighted, byte* to,
                             const byte* bias, unsigned segment, const Segments& share) {
  constexpr int kColumns = 2;
  if (count == 1 && !weighted && !bias) return copy_part<T, kEach>(combine, rows.at[0], to, segment, share);
  const Vectors<T, kEach> vectors(combine, segment, share);
  for (unsigned i = vectors.first + lane(); i < vectors.end; i += 32 * kColumns) {
    Pack<T, kEach> parts[kColumns];
    weigh<T, kEach, kColumns>(rows, count, weighted, i, vectors.end, parts);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (i + 32 * c >= vectors.end) continue;
      if (bias) {
        Sum<T, kEach> sum;
        sum.add(parts[c]);
        sum.add(load<T, kEach>(bias, i + 32 * c));
        parts[c] = sum.rounded();
      }
      reinterpret_cast<Pack<T, kEach>*>(to)[i + 32 * c] = parts[c];
    }
  }
}

// A token whose parts a warp sums: where they lie.
template <Has kHas>
struct Parts {
  // packed: the lane's copy of the token, as Space::homes has it.
  __device__ Parts(const Work& work, const Combine& combine, const Sources& sources, Rows& rows,
                   unsigned token, std::int32_t packed) {
    const Dims& d = work.dims;
    const auto k = static_cast<unsigned>(d.top_k);
    const Home home(packed);
    const bool here = packed != kNone && home.rank == d.rank;
    if (kHas != Has::all && packed != kNone && (kHas == Has::row || !here))
      from = sources.first[home.rank] + std::size_t{static_cast<unsigned>(home.position)} * combine.bytes;
    homes = __popc(__ballot_sync(kAllLanes, packed != kNone));
    if constexpr (kHas == Has::row) return;
    const float* const weights = weights_of(work, combine, d.rank);
    weighted = weights != nullptr;
    if (kHas == Has::all && d.expert_major()) {  // no pair_rows are set
      const std::size_t pair = std::size_t{token} * k + lane();
      const std::int32_t row = lane() < k ? table<std::int32_t>(work, work.space.places)[pair] : kNone;
      own_rows = list_rows(combine, weights, rows, row);
      if (weighted) Rows::await();
    } else if (const unsigned own = __ballot_sync(kAllLanes, here); own != 0) {
      place = __ffs(static_cast<int>(own)) - 1;
      const auto position = static_cast<unsigned>(__shfl_sync(kAllLanes, home.position, place));
      own_rows = find_rows(work, combine, d.rank, position, weights, rows);
      if (weighted) Rows::await();
      if (kHas == Has::all || own_rows != 1 || weighted) return;
      if (here) from = rows.at[0];
      place = kNone;
    }
  }
  const byte* from = nullptr;  // of the lane's copy: what another rank has pushed, or lends, or a row here
  int homes, own_rows = 0;
  int place = kNone;  // among all copies, of that whose rows here are to be summed
  bool weighted = false;
};

// Sums a token's parts by rank, and its bias, from the warp's vector `first` on, kColumns of each lane. Lanes
// without a vector go along, for their shuffles. kAhead: parts that are loaded before the first is added.
template <class T, int kEach, int kColumns, int kAhead, Has kHas>
__device__ void sum_vectors(const Parts<kHas>& parts, const Rows& rows, const byte* bias, unsigned first,
                            unsigned end, byte* out) {
  using Vector = Pack<T, kEach>;
  const unsigned i = first + lane();
  Vector own[kColumns] = {}, last[kColumns] = {};
  if constexpr (kHas == Has::pairs)
    if (parts.place != kNone) weigh<T, kEach, kColumns>(rows, parts.own_rows, parts.weighted, i, end, own);
  Sum<T, kEach> sums[kColumns];
  for (int part = 0; part < parts.homes; part += kAhead) {
    Vector some[kAhead][kColumns];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const auto* const at = reinterpret_cast<const byte*>(
          __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(parts.from), (part + u) % 32));
      const bool comes = part + u < parts.homes && (kHas == Has::row || part + u != parts.place);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        some[u][c] = own[c];
        if (comes && i + 32 * c < end) some[u][c] = load<T, kEach>(at, i + 32 * c);
      }
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u)
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        if (part + u < parts.homes) sums[c].add(some[u][c]);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) last[c] = some[0][c];
  }
  const int all = parts.homes + (bias ? 1 : 0);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    if (i + 32 * c >= end) continue;
    if (bias) sums[c].add(last[c] = load<T, kEach>(bias, i + 32 * c));
    reinterpret_cast<Vector*>(out)[i + 32 * c] = all > 1 ? sums[c].rounded() : last[c];
  }
}

template <class T, int kEach, Has kHas>
__device__ void sum_token(const Work& work, const Combine& combine, const Sources& sources, Rows& rows,
                          unsigned token, std::int32_t packed, unsigned segment, const Segments& share) {
  const Parts<kHas> parts(work, combine, sources, rows, token, packed);
  byte* const out = combine.out + std::size_t{token} * combine.bytes;
  const byte* const bias = combine.bias ? combine.bias + std::size_t{token} * combine.bytes : nullptr;
  if constexpr (kHas == Has::all) {
    if (bias && parts.homes == 0) return copy_part<T, kEach>(combine, bias, out, segment, share);
    return combine_rows<T, kEach>(combine, rows, parts.own_rows, parts.weighted, out, bias, segment, share);
  } else {
    const Vectors<T, kEach> vectors(combine, segment, share);
    const auto sum = [&]<int kColumns, int kAhead>() {
      for (unsigned first = vectors.first; first < vectors.end; first += 32 * kColumns)
        sum_vectors<T, kEach, kColumns, kAhead, kHas>(parts, rows, bias, first, vectors.end, out);
    };
    if (kHas == Has::row && parts.homes <= 2) sum.template operator()<4, 2>();
    else sum.template operator()<2, 4>();
  }
}

}  // namespace
}  // namespace unisono::moe::gpu
