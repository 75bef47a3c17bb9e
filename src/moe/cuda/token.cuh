// A token of a dispatch, as a warp has it: where its rows go, and what their receivers are told.
#pragma once

#include "moe/cuda/rows.cuh"

namespace unisono::moe::gpu {
namespace {

// A token as a warp has it: lane i has the token's i-th expert and its i-th copy.
struct Token {
  Token() = default;
  // Reads it from the slot.
  __device__ Token(const Work& work, unsigned token)
      : first_there(table<std::uint32_t>(work, work.space.first_there)) {
    const auto k = static_cast<unsigned>(work.dims.top_k);
    const std::size_t at = std::size_t{token} * k + lane();
    const bool has = lane() < k;
    expert = has ? table<std::int32_t>(work, work.space.experts)[at] : kNone;
    place = has ? table<std::int32_t>(work, work.space.places)[at] : kNone;
    home = has ? table<std::int32_t>(work, work.space.homes)[at] : kNone;
    rank = expert < 0 ? kNone : work.dims.rank_of(expert);
    homes = __popc(__ballot_sync(kAllLanes, home != kNone));
  }
  // Returns the row of a copy at its rank. Rows of tokens with expert_major are those of pair_rows.
  __device__ std::int32_t row_of(const Home& home) const {
    return static_cast<std::int32_t>(first_there[home.rank]) + home.position;
  }
  std::int32_t expert, place, home;
  int rank, homes;
  const std::uint32_t* first_there;  // [ranks]: the first row of this rank's tokens there
};

// Lists the rows to which a token's row goes: each copy; or each pair at this rank, and one at each other.
__device__ int find_targets(const Work& work, const Dispatch& dispatch, const Token& token,
                            Targets& targets) {
  bool sends = token.home != kNone;
  Target target{};
  if (work.dims.expert_major()) {
    const bool exists = token.place != kNone;
    const unsigned alike =
        __match_any_sync(kAllLanes, exists ? static_cast<unsigned>(token.rank) : 0x80000000u | lane());
    sends = exists && (token.rank == work.dims.rank || (alike & ((1u << lane()) - 1)) == 0);
    target = {token.rank, token.place};
  } else if (sends) {
    const Home home(token.home);
    target = {home.rank, token.row_of(home)};
    if (dispatch.copies && home.rank != work.dims.rank)  // waits here
      target = {
          work.dims.rank,
          static_cast<std::int32_t>(work.space.leaving + home.rank * work.dims.max_tokens) + home.position};
  }
  const unsigned all = __ballot_sync(kAllLanes, sends);
  if (sends) targets.of[__popc(all & ((1u << lane()) - 1))] = target;
  __syncwarp();
  return __popc(all);
}

// Tells a receiver of flat or rank_major rows a token's experts there, and their weights: each lane one.
__device__ void tell_row(const Work& work, const Dispatch& dispatch, const Target& to, int expert, int rank,
                         float weight) {
  const Dims& d = work.dims;
  const auto k = static_cast<unsigned>(d.top_k);
  if (lane() >= k) return;
  const bool here = rank == to.rank;
  const std::size_t at = static_cast<std::size_t>(to.row) * k + lane();
  if (!dispatch.routed)
    table<std::int32_t>(work, to.rank, work.space.topk_idx)[at] =
        here ? expert - to.rank * d.local_experts : kNone;
  if (dispatch.weights) table<float>(work, to.rank, work.space.weights)[at] = here ? weight : 0.0f;
}

// Tells a token's receivers its experts there, and their weights.
__device__ void tell_routes(const Work& work, const Dispatch& dispatch, const Token& token, unsigned number) {
  const Dims& d = work.dims;
  const auto k = static_cast<unsigned>(d.top_k);
  const float weight =
      dispatch.weights && lane() < k ? dispatch.weights[std::size_t{number} * k + lane()] : 0;
  for (int h = 0; h < token.homes; ++h) {
    const Home home(__shfl_sync(kAllLanes, token.home, h));
    const std::int32_t row = token.row_of(home);
    const bool here = token.rank == home.rank;
    if (!d.expert_major()) {
      tell_row(work, dispatch, {home.rank, row}, token.expert, token.rank, weight);
      if (!dispatch.routed && here && !d.drop)  // otherwise the receiver sorts
        table<std::int32_t>(work, home.rank, work.space.expert_rows)[token.place] = row;
    } else if (!dispatch.routed && d.ranks > 1 && lane() < k) {
      table<std::int32_t>(work, home.rank, work.space.pair_rows)[static_cast<std::size_t>(row) * k + lane()] =
          here ? token.place : kNone;
    }
  }
  if (d.expert_major() && dispatch.weights && token.place != kNone)
    table<float>(work, token.rank, work.space.weights)[token.place] = weight;
}

// Copies a segment of a token's rows, of all payloads from the first one on.
__device__ void copy_payloads(const Work& work, const Dispatch& dispatch, Targets& targets, int count,
                              int first, unsigned token, unsigned segment, const Segments& share) {
  for (int p = first; p < dispatch.payloads.count; ++p) {
    const Payload& payload = dispatch.payloads.of[p];
    aim(work, targets, count, payload.to, payload.bytes);
    copy_row(payload.from + std::size_t{token} * payload.bytes, targets.at, count, payload.bytes,
             payload.word, segment, share);
  }
}

// Sends a segment of a token's rows. kScales: of x, whose elements are of type T.
template <class T, MoeScales kScales>
__device__ void send_rows(const Work& work, const Dispatch& dispatch, Targets& targets, int count,
                          unsigned token, unsigned segment, const Segments& share) {
  const Dims& d = work.dims;
  constexpr bool kQuantised = kScales != MoeScales::none;
  if constexpr (kQuantised) {
    const Payload& x = dispatch.payloads.of[0];
    aim(work, targets, count, x.to, x.bytes);
    quantise_row<T, kScales>(work, x.from + token * d.row_bytes, targets, count,
                             work.space.x(work.epoch) + work.space.scales, dispatch.wide, segment, share);
  }
  copy_payloads(work, dispatch, targets, count, kQuantised ? 1 : 0, token, segment, share);
}

}  // namespace
}  // namespace unisono::moe::gpu
