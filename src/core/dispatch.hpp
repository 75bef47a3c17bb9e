// From the name of an algorithm to its program on a lane.
#pragma once

#include "core/plan.hpp"
#include "lane/channel.hpp"
#include "programs/all_gather.hpp"
#include "programs/all_reduce.hpp"
#include "programs/all_to_all.hpp"
#include "programs/broadcast.hpp"
#include "programs/gather.hpp"
#include "programs/reduce.hpp"
#include "programs/reduce_scatter.hpp"
#include "programs/scatter.hpp"

namespace unisono {

// Programs that take any pointer, over packets or chunks.
template <class Channel>
void run_push(Channel channel, Collective collective, Algorithm algorithm, const Args& args) {
  using enum Algorithm;
  switch (collective) {
    case Collective::all_reduce:
      if (algorithm == one_shot || algorithm == one_shot_packets) return all_reduce_one_shot(channel, args);
      if (algorithm == reduce_scatter_all_gather) return all_reduce_reduce_scatter_all_gather(channel, args);
      return all_reduce_two_shot(channel, args);
    case Collective::reduce: return reduce_push(channel, args);
    case Collective::broadcast:
      if (algorithm == scatter_all_gather) return broadcast_scatter_all_gather(channel, args);
      if (algorithm == chain) return broadcast_chain(channel, args);
      return broadcast_push(channel, args);
    case Collective::all_gather: return all_gather_push(channel, args);
    case Collective::gather: return gather_push(channel, args);
    case Collective::reduce_scatter: return reduce_scatter_push(channel, args);
    case Collective::scatter: return scatter_push(channel, args);
    default: return all_to_all_push(channel, args);
  }
}

// Programs that reach into the peers' buffers.
template <class Lane>
void run_direct(Lane& lane, Collective collective, Algorithm algorithm, const Args& args) {
  ChunkChannel<Lane> channel(lane);
  switch (collective) {
    case Collective::all_reduce:
      if (algorithm == Algorithm::two_shot_push) return all_reduce_two_shot_push(channel, args);
      return all_reduce_two_shot_direct(lane, args);
    case Collective::reduce:
      if (algorithm == Algorithm::two_shot_push) return reduce_two_shot_push(channel, args);
      return reduce_direct(lane, args);
    case Collective::broadcast: return broadcast_direct(lane, args);
    case Collective::all_gather: return all_gather_direct(lane, args);
    case Collective::gather: return gather_direct(lane, args);
    case Collective::reduce_scatter: return reduce_scatter_direct(lane, args);
    case Collective::scatter: return scatter_direct(lane, args);
    default: return all_to_all_direct(lane, args);
  }
}

template <class Lane>
void run(Lane& lane, Collective collective, Algorithm algorithm, const Args& args) {
  if (is_direct(algorithm)) return run_direct(lane, collective, algorithm, args);
  if (is_packets(algorithm)) return run_push(PacketChannel<Lane>(lane), collective, algorithm, args);
  run_push(ChunkChannel<Lane>(lane), collective, algorithm, args);
}

}  // namespace unisono
