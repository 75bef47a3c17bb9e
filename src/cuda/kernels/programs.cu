#include "cuda/programs.hpp"

#include <type_traits>

#include "cuda/device/cuda_block.cuh"
#include "programs/all_gather.hpp"
#include "programs/all_reduce.hpp"
#include "programs/all_to_all.hpp"
#include "programs/broadcast.hpp"
#include "programs/gather.hpp"
#include "programs/reduce.hpp"
#include "programs/reduce_scatter.hpp"
#include "programs/scatter.hpp"
#include "programs/send_recv.hpp"

namespace unisono::cuda {
namespace {

template <class Reduction>
__device__ Reduction reduction(const Launch& launch) {
  if constexpr (std::is_same_v<Reduction, ByTable>)
    return {reductions[static_cast<int>(launch.dtype)][static_cast<int>(launch.op)]};
  else return {};
}

// As dispatch.hpp does for the host, but chosen by the compiler: a kernel holds one program.
template <Collective collective, Algorithm algorithm, class Channel>
__device__ void run_push(Channel channel, const Launch& launch, const Args& args) {
  using enum Collective;
  using enum Algorithm;
  if constexpr (algorithm == one_shot) all_reduce_one_shot(channel, args);
  else if constexpr (algorithm == reduce_scatter_all_gather)
    all_reduce_reduce_scatter_all_gather(channel, args);
  else if constexpr (algorithm == scatter_all_gather) broadcast_scatter_all_gather(channel, args);
  else if constexpr (algorithm == chain) broadcast_chain(channel, args);
  else if constexpr (collective == all_reduce) all_reduce_two_shot(channel, args);
  else if constexpr (collective == Collective::reduce) reduce_push(channel, args);
  else if constexpr (collective == broadcast) broadcast_push(channel, args);
  else if constexpr (collective == all_gather) all_gather_push(channel, args);
  else if constexpr (collective == gather) gather_push(channel, args);
  else if constexpr (collective == reduce_scatter) reduce_scatter_push(channel, args);
  else if constexpr (collective == scatter) scatter_push(channel, args);
  else if constexpr (collective == send_recv)
    send_recv_push(channel, launch.to, launch.sent, launch.from, launch.received, args);
  else all_to_all_push(channel, args);
}

template <Collective collective, Algorithm algorithm, class Lane>
__device__ void run_direct(Lane& lane, const Launch& launch, const Args& args) {
  using enum Collective;
  if constexpr (collective == all_to_all_v) {
    ChunkChannel<Lane> channel(lane);
    all_to_all_told(channel, args);
  } else if constexpr (collective == send_recv) {
    ChunkChannel<Lane> channel(lane);
    send_recv_told(channel, launch.to, launch.sent, launch.from, launch.received, launch.mine, args);
  } else if constexpr (algorithm == Algorithm::two_shot_push) {
    ChunkChannel<Lane> channel(lane);
    if constexpr (collective == all_reduce) all_reduce_two_shot_push(channel, args);
    else reduce_two_shot_push(channel, args);
  } else if constexpr (collective == all_reduce && algorithm == Algorithm::copy_engine) {
    all_reduce_combine(lane, args);
  } else if constexpr (algorithm == Algorithm::copy_engine) copy_beside(lane, args);
  else if constexpr (collective == all_reduce) all_reduce_two_shot_direct(lane, args);
  else if constexpr (collective == Collective::reduce) reduce_direct(lane, args);
  else if constexpr (collective == broadcast) broadcast_direct(lane, args);
  else if constexpr (collective == all_gather) all_gather_direct(lane, args);
  else if constexpr (collective == gather) gather_direct(lane, args);
  else if constexpr (collective == reduce_scatter) reduce_scatter_direct(lane, args);
  else if constexpr (collective == scatter) scatter_direct(lane, args);
  else all_to_all_direct(lane, args);
}

template <Collective collective, Algorithm algorithm, class Reduction>
__global__ void __launch_bounds__(kMaxThreads) program(const __grid_constant__ Launch launch) {
  follow_last_kernel();
  using Lane = CudaBlock<Reduction>;
  typename Lane::Arrays arrays;
  Lane lane(launch.context, arrays, reduction<Reduction>(launch));
  Args args = launch.args;
  args.inputs = launch.inputs;
  args.outputs = launch.outputs;
  args.sends = launch.by_parts ? launch.sends : nullptr;
  args.receives = launch.by_parts ? launch.receives : nullptr;
  if constexpr (collective == Collective::barrier) meet(lane);
  else if constexpr (is_direct(algorithm)) run_direct<collective, algorithm>(lane, launch, args);
  else run_push<collective, algorithm>(ChunkChannel(lane), launch, args);
  lane.finish();
}

// A program that combines: by the table, but with its reduction compiled in for what training sums.
template <Collective collective, Algorithm algorithm>
Kernel combining(DType dtype, Op op) {
  if (op == Op::sum && dtype == DType::f32) return program<collective, algorithm, Inline<float, Op::sum>>;
  if (op == Op::sum && dtype == DType::bf16) return program<collective, algorithm, Inline<BF16, Op::sum>>;
  return program<collective, algorithm, ByTable>;
}

// The two programs that most collectives have.
template <Collective collective>
Kernel moving(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::push: return program<collective, Algorithm::push, Bytes>;
    case Algorithm::direct: return program<collective, Algorithm::direct, Bytes>;
    default: return nullptr;
  }
}
template <Collective collective>
Kernel combining(Algorithm algorithm, DType dtype, Op op) {
  switch (algorithm) {
    case Algorithm::push: return combining<collective, Algorithm::push>(dtype, op);
    case Algorithm::direct: return combining<collective, Algorithm::direct>(dtype, op);
    default: return nullptr;
  }
}

Kernel all_reduce(Algorithm algorithm, DType dtype, Op op) {
  using enum Algorithm;
  constexpr Collective collective = Collective::all_reduce;
  switch (algorithm) {
    case one_shot: return combining<collective, one_shot>(dtype, op);
    case two_shot: return combining<collective, two_shot>(dtype, op);
    case two_shot_push: return combining<collective, two_shot_push>(dtype, op);
    case copy_engine: return combining<collective, copy_engine>(dtype, op);
    case two_shot_direct: return combining<collective, two_shot_direct>(dtype, op);
    case reduce_scatter_all_gather: return combining<collective, reduce_scatter_all_gather>(dtype, op);
    default: return nullptr;
  }
}

}  // namespace

Kernel kernel(Collective collective, Algorithm algorithm, DType dtype, Op op) {
  using enum Algorithm;
  switch (collective) {
    case Collective::all_reduce: return all_reduce(algorithm, dtype, op);
    case Collective::reduce:
      if (algorithm == two_shot_push) return combining<Collective::reduce, two_shot_push>(dtype, op);
      return combining<Collective::reduce>(algorithm, dtype, op);
    case Collective::reduce_scatter: return combining<Collective::reduce_scatter>(algorithm, dtype, op);
    case Collective::broadcast:
      if (algorithm == scatter_all_gather) return program<Collective::broadcast, scatter_all_gather, Bytes>;
      if (algorithm == chain) return program<Collective::broadcast, chain, Bytes>;
      return moving<Collective::broadcast>(algorithm);
    case Collective::all_gather: return moving<Collective::all_gather>(algorithm);
    case Collective::gather: return moving<Collective::gather>(algorithm);
    case Collective::scatter: return moving<Collective::scatter>(algorithm);
    case Collective::all_to_all:
    case Collective::all_to_all_v:
    case Collective::batch_send_recv:
      if (algorithm == copy_engine) return program<Collective::all_to_all, copy_engine, Bytes>;
      if (algorithm == direct && collective != Collective::all_to_all)
        return program<Collective::all_to_all_v, direct, Bytes>;
      return moving<Collective::all_to_all>(algorithm);
    case Collective::send:
    case Collective::recv:
    case Collective::send_recv:
      if (algorithm == push) return program<Collective::send_recv, push, Bytes>;
      return algorithm == direct ? program<Collective::send_recv, direct, Bytes> : nullptr;
    case Collective::barrier: return program<Collective::barrier, automatic, Bytes>;
    default: return nullptr;
  }
}

}  // namespace unisono::cuda
