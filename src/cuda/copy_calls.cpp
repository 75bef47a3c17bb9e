// The calls that copy engines carry out.
#include <algorithm>
#include <utility>

#include "cuda/gpu_engine.hpp"

namespace unisono::cuda {
namespace {

constexpr std::size_t kStart = std::size_t{2} << 20;  // bytes that the links carry while a copy starts

}  // namespace

void GpuEngine::copy(byte* to, const byte* from, std::size_t bytes, cudaStream_t stream) {
  if (to != from && bytes > 0)
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream), "a copy");
}

// Copies to the peers one after the other, in ring order: each rank gets one copy at a time. All ranks meet
// before and after. A kernel beside the copies gives the first peer what the links carry while a copy engine
// starts. The kernel also moves this rank's own block, which would slow the other copies down.
void GpuEngine::copy_by_engine(const Launch& launch, Collective collective, cudaStream_t stream) {
  const Args& a = launch.args;
  const int n = group_.size(), me = group_.rank();
  struct Copy {
    byte* to;
    const byte* from;
    std::size_t bytes;
  };
  const CollectiveTraits& traits = traits_of(collective);
  const std::size_t bytes = traits.by_blocks() ? a.block : a.bytes;
  auto copy_to = [&](int p) -> Copy {
    if (!traits.stores.out)  // each rank loads its own block
      return {traits.moves(p, me, a.root) ? a.out : nullptr,
              (p == me ? a.in : launch.inputs[p]) + traits.in.begin(a.block, me), bytes};
    return {traits.moves(me, p, a.root) ? launch.outputs[p] + traits.out.begin(a.block, me) : nullptr,
            a.in + traits.in.begin(a.block, p), bytes};
  };
  const bool by_kernel = blocks_ >= kBeside.blocks;  // fewer blocks are slower
  Launch beside = launch;
  beside.by_parts = true;
  std::size_t longest = 0;
  auto leave = [&](int p, const Copy& one) {
    beside.inputs[p] = one.from;
    beside.outputs[p] = one.to;
    beside.sends[p].bytes = one.bytes;
    longest = std::max(longest, one.bytes);
  };
  meet(launch, stream);
  order(stream, side_, fork_);
  std::size_t start = by_kernel ? kStart : 0;
  for (int i = 1; i < n; ++i) {
    const int p = (me + i) % n;
    const Copy one = copy_to(p);
    if (!one.to) continue;
    const std::size_t first = std::min(std::exchange(start, 0), one.bytes);
    if (first > 0) leave(p, {one.to, one.from, first});
    copy(one.to + first, one.from + first, one.bytes - first, side_);
  }
  if (const Copy own = copy_to(me); own.to && own.to != own.from) {
    if (by_kernel) leave(me, own);
    else copy(own.to, own.from, own.bytes, stream);
  }
  if (longest > 0)
    this->launch(kernel(Collective::all_to_all, Algorithm::copy_engine, DType::u8, Op::sum, false), beside,
                 cut(Algorithm::copy_engine, kBeside, longest), stream);
  order(side_, stream, join_);
  meet(launch, stream);
}

void GpuEngine::combine(Launch& launch, Range part, const Shape& asked, cudaStream_t stream) const {
  launch.args.out += part.begin;
  launch.args.bytes = part.bytes;
  this->launch(kernel(Collective::all_reduce, Algorithm::copy_engine, launch.dtype, launch.op, false), launch,
               cut(Algorithm::copy_engine, asked, std::max<std::size_t>(part.bytes, 1)), stream);
}

// Requires two ranks. Copies the other's input to the place of the sums, while a kernel combines what has
// arrived. Each part is half of the rest, so that little is left to combine after the last has arrived.
void GpuEngine::reduce_by_engine(const Launch& launch, const Shape& asked, cudaStream_t stream) {
  const Args& a = launch.args;
  const int me = group_.rank();
  constexpr std::size_t kLeast = std::size_t{16} << 20;
  meet(launch, stream);
  for (Range part; part.begin < a.bytes; part.begin += part.bytes) {
    const std::size_t left = a.bytes - part.begin;
    part.bytes = left < 2 * kLeast ? left : round_up(left / 2, kAlign);
    if (me != a.root) copy(launch.outputs[a.root] + part.begin, a.in + part.begin, part.bytes, stream);
    order(stream, side_, fork_);
    meet(launch, side_);
    if (me != a.root) continue;
    Launch sum = launch;
    for (int p = 0; p < 2; ++p) sum.inputs[p] = (p == me ? a.in : a.out) + part.begin;
    combine(sum, part, asked, side_);
  }
  order(side_, stream, join_);
}

// Copies shards to their owners, part by part and in ring order: one peer's arrives at a time. A kernel
// beside the copies combines what has arrived. The sums follow all shards the same way. Until a peer's sum
// arrives, the place of its shard in this rank's output holds what the peer has sent.
void GpuEngine::all_reduce_by_engine(const Launch& launch, std::size_t bytes, const Shape& asked,
                                     cudaStream_t stream) {
  const Args& a = launch.args;
  const int n = group_.size(), me = group_.rank();
  constexpr std::size_t kPart = std::size_t{32} << 20;  // bytes; a copy's start costs as much as 4 MiB
  const std::size_t shard = bytes / static_cast<std::size_t>(n);
  const int parts = static_cast<int>(std::clamp<std::size_t>(shard / kPart, 1, kMostParts));
  const std::size_t part =
      round_up((shard + static_cast<std::size_t>(parts) - 1) / static_cast<std::size_t>(parts), kAlign);
  auto piece = [&](int owner, int index) {
    const Range in = block_of(shard, part, index);
    return Range{shard * static_cast<std::size_t>(owner) + in.begin, in.bytes};
  };
  meet(launch, stream);  // every input is complete, and every output may be written
  for (int index = 0; index < parts; ++index) {
    for (int i = 1; i < n; ++i) {
      const int p = (me + i) % n;
      const Range its = piece(p, index);
      copy(launch.outputs[p] + piece(me, index).begin, a.in + its.begin, its.bytes, stream);
    }
    order(stream, side_, fork_);
    meet(launch, side_);
    const Range mine = piece(me, index);
    Launch sum = launch;
    for (int p = 0; p < n; ++p) sum.inputs[p] = p == me ? a.in + mine.begin : a.out + piece(p, index).begin;
    combine(sum, mine, asked, side_);
    meet(launch, side_);  // every rank has combined its part: sums may take the place of what arrived
    check(cudaEventRecord(combined_[index], side_), "ordering two streams");
  }
  for (int index = 0; index < parts; ++index) {
    check(cudaStreamWaitEvent(stream, combined_[index], 0), "ordering two streams");
    const Range mine = piece(me, index);
    for (int i = 1; i < n; ++i)
      copy(launch.outputs[(me + i) % n] + mine.begin, a.out + mine.begin, mine.bytes, stream);
  }
  meet(launch, stream);
}

}  // namespace unisono::cuda
