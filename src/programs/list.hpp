// The list of all programs. The dispatch of the host and the fabric (core/dispatch.hpp), the kernels
// (cuda/kernels/programs.cu) and the names that a call may give (Plan::algorithms) are made from the list. A
// program over chunks runs over packets and lines too if traits.hpp has such an algorithm of its form.
//
// A row is F(collective, algorithm, program, operand): program(operand, args) runs on every rank. `operand`
// is `channel` or `lane`.
#pragma once

#include "base/traits.hpp"
#include "programs/all_gather.hpp"
#include "programs/all_reduce.hpp"
#include "programs/all_to_all.hpp"
#include "programs/broadcast.hpp"
#include "programs/gather.hpp"
#include "programs/reduce.hpp"
#include "programs/reduce_scatter.hpp"
#include "programs/scatter.hpp"

namespace unisono {

// Returns a number for each pair, for switch statements.
constexpr int program_key(Collective collective, Algorithm algorithm) {
  return static_cast<int>(collective) * kAlgorithms + static_cast<int>(algorithm);
}

}  // namespace unisono

// Programs that take any pointer.
#define UNISONO_PUSH_PROGRAMS(F)                                                          \
  F(all_reduce, one_shot, all_reduce_one_shot, channel)                                   \
  F(all_reduce, two_shot, all_reduce_two_shot, channel)                                   \
  F(all_reduce, reduce_scatter_all_gather, all_reduce_reduce_scatter_all_gather, channel) \
  F(reduce, push, reduce_push, channel)                                                   \
  F(broadcast, push, broadcast_push, channel)                                             \
  F(broadcast, chain, broadcast_chain, channel)                                           \
  F(broadcast, scatter_all_gather, broadcast_scatter_all_gather, channel)                 \
  F(all_gather, push, all_gather_push, channel)                                           \
  F(gather, push, gather_push, channel)                                                   \
  F(reduce_scatter, push, reduce_scatter_push, channel)                                   \
  F(scatter, push, scatter_push, channel)                                                 \
  F(all_to_all, push, all_to_all_push, channel)                                           \
  F(all_to_all_v, push, all_to_all_push, channel)                                         \
  F(batch_send_recv, push, all_to_all_push, channel)

// Direct programs that only store to peers, as a NIC does.
#define UNISONO_STORE_PROGRAMS(F)                \
  F(all_gather, direct, all_gather_direct, lane) \
  F(gather, direct, gather_direct, lane)         \
  F(all_to_all, direct, all_to_all_direct, lane)

// The other direct programs: they load from peers.
#define UNISONO_LOAD_PROGRAMS(F)                                   \
  F(all_reduce, two_shot_push, all_reduce_two_shot_push, channel)  \
  F(all_reduce, two_shot_direct, all_reduce_two_shot_direct, lane) \
  F(reduce, two_shot_push, reduce_two_shot_push, channel)          \
  F(reduce, direct, reduce_direct, lane)                           \
  F(broadcast, direct, broadcast_direct, lane)                     \
  F(reduce_scatter, direct, reduce_scatter_direct, lane)           \
  F(scatter, direct, scatter_direct, lane)

// The further algorithms of GPUs, by exchange kernels and copy engines: F(collective, algorithm).
#define UNISONO_GPU_ALGORITHMS(F) \
  F(reduce, two_shot_ll128)       \
  F(broadcast, two_shot_ll128)    \
  F(all_reduce, copy_engine)      \
  F(reduce, copy_engine)          \
  F(broadcast, copy_engine)       \
  F(all_gather, copy_engine)      \
  F(gather, copy_engine)          \
  F(scatter, copy_engine)         \
  F(all_to_all, copy_engine)
