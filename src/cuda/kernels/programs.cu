#include "cuda/programs.hpp"

#include <type_traits>

#include "cuda/device/cuda_block.cuh"
#include "programs/list.hpp"
#include "programs/send_recv.hpp"

namespace unisono::cuda {
namespace {

template <class Reduction, int kMost>
__device__ Reduction reduction(const LaunchOf<kMost>& launch) {
  const int dtype = static_cast<int>(launch.dtype), op = static_cast<int>(launch.op);
  if constexpr (std::is_same_v<Reduction, ByTable>) return {reductions[dtype][op]};
  else if constexpr (std::is_same_v<Reduction, ByTableOfMany>) return {{reductions_of_many[dtype][op]}};
  else return {};
}

// Runs the programs that only this lane has: messages of different sizes, whose receivers tell of their
// memory, and kernels beside copy engines.
template <Collective collective, Algorithm algorithm, class Channel, class Launch>
__device__ void run_own(Channel& channel, const Launch& launch, const Args& args) {
  using enum Collective;
  if constexpr (collective == send_recv && algorithm == Algorithm::push)
    send_recv_push(channel, launch.to, launch.sent, launch.from, launch.received, args);
  else if constexpr (collective == send_recv)
    send_recv_told(channel, launch.to, launch.sent, launch.from, launch.received, launch.mine, args);
  else if constexpr (collective == all_to_all_v) all_to_all_told(channel, args);
  else if constexpr (collective == all_reduce) all_reduce_combine(channel.lane, args);
  else copy_beside(channel.lane, args);
}
constexpr bool is_own(Collective collective, Algorithm algorithm) {
  return collective == Collective::send_recv || algorithm == Algorithm::copy_engine ||
         (collective == Collective::all_to_all_v && algorithm == Algorithm::direct);
}

// Runs a program, as dispatch.hpp does for the host. The compiler chooses it: a kernel holds one program.
template <Collective collective, Algorithm algorithm, class Lane>
__device__ void run_program(Lane& lane, const Args& args) {
  [[maybe_unused]] ChunkChannel<Lane> channel(lane);
#define UNISONO_RUN(c, a, program, operand) \
  if constexpr (collective == Collective::c && algorithm == Algorithm::a) program(operand, args);
  UNISONO_PUSH_PROGRAMS(UNISONO_RUN)
  UNISONO_STORE_PROGRAMS(UNISONO_RUN)
  UNISONO_LOAD_PROGRAMS(UNISONO_RUN)
#undef UNISONO_RUN
}

template <Collective collective, Algorithm algorithm, class Reduction, int kMost>
__global__ void __launch_bounds__(kMaxThreads) program(const __grid_constant__ LaunchOf<kMost> launch) {
  follow_last_kernel();
  using Lane = CudaBlock<kMost, Reduction>;
  typename Lane::Arrays arrays;
  Lane lane(launch.context, arrays, reduction<Reduction>(launch));
  Args args = launch.args;
  args.inputs = launch.inputs;
  args.outputs = launch.outputs;
  args.sends = launch.by_parts ? launch.sends : nullptr;
  args.receives = launch.by_parts ? launch.receives : nullptr;
  if constexpr (collective == Collective::barrier) {
    meet(lane);
  } else if constexpr (is_own(collective, algorithm)) {
    ChunkChannel channel(lane);
    run_own<collective, algorithm>(channel, launch, args);
  } else {
    run_program<collective, algorithm>(lane, args);
  }
  lane.finish();
}

template <Collective collective, Algorithm algorithm, class Reduction, int kMost>
const void* address() {
  void (*const kernel)(LaunchOf<kMost>) = program<collective, algorithm, Reduction, kMost>;
  return reinterpret_cast<const void*>(kernel);
}

// Returns the kernel of a program. One that combines does so by the table, except that the sums of training
// have their reduction compiled in.
template <Collective collective, Algorithm algorithm>
const void* made_for_few(DType dtype, Op op) {
  if constexpr (!traits_of(collective).combines) return address<collective, algorithm, Bytes, kFewRanks>();
  else if (op == Op::sum && dtype == DType::f32)
    return address<collective, algorithm, Inline<float, Op::sum>, kFewRanks>();
  else if (op == Op::sum && dtype == DType::bf16)
    return address<collective, algorithm, Inline<BF16, Op::sum>, kFewRanks>();
  else return address<collective, algorithm, ByTable, kFewRanks>();
}
template <Collective collective, Algorithm algorithm>
const void* made(DType dtype, Op op, bool many) {
  if (!many) return made_for_few<collective, algorithm>(dtype, op);
  if constexpr (!runs_on_many(algorithm) || collective == Collective::barrier) return nullptr;
  else if constexpr (!traits_of(collective).combines)
    return address<collective, algorithm, Bytes, kMaxRanks>();
  else return address<collective, algorithm, ByTableOfMany, kMaxRanks>();
}

// Returns the collective whose kernel a call takes.
constexpr Collective kernel_of(Collective collective, Algorithm algorithm) {
  using enum Collective;
  if (traits_of(collective).two_ended) return send_recv;
  if (traits_of(collective).by_parts()) return algorithm == Algorithm::direct ? all_to_all_v : all_to_all;
  return collective;
}

}  // namespace

const void* kernel(Collective collective, Algorithm algorithm, DType dtype, Op op, bool many) {
  using enum Collective;
  using enum Algorithm;
  switch (program_key(kernel_of(collective, algorithm), algorithm)) {
#define UNISONO_CASE(c, a, program, operand)     \
  case program_key(Collective::c, Algorithm::a): \
    return made<kernel_of(Collective::c, Algorithm::a), Algorithm::a>(dtype, op, many);
    UNISONO_PUSH_PROGRAMS(UNISONO_CASE)
    UNISONO_STORE_PROGRAMS(UNISONO_CASE)
    UNISONO_LOAD_PROGRAMS(UNISONO_CASE)
#undef UNISONO_CASE
    case program_key(send_recv, push): return made<send_recv, push>(dtype, op, many);
    case program_key(send_recv, direct): return made<send_recv, direct>(dtype, op, many);
    case program_key(all_to_all_v, direct): return made<all_to_all_v, direct>(dtype, op, many);
    case program_key(all_reduce, copy_engine): return made<all_reduce, copy_engine>(dtype, op, many);
    case program_key(all_to_all, copy_engine): return made<all_to_all, copy_engine>(dtype, op, many);
    case program_key(barrier, automatic): return made<barrier, automatic>(dtype, op, many);
    default: return nullptr;
  }
}

}  // namespace unisono::cuda
