#include "lane/cuda/programs.hpp"

#include <array>
#include <cstdint>
#include <utility>

#include "dispatch.hpp"
#include "lane/cuda/cuda_block.cuh"
#include "programs/send_recv.hpp"

namespace unisono::cuda {
namespace {

template <Collective collective, Algorithm algorithm, class Lane>
__device__ void run(Lane& lane, const Launch& launch, const Args& args) {
  if constexpr (collective == Collective::barrier) {
    meet(lane);
  } else if constexpr (collective == Collective::send_recv) {
    if constexpr (is_packets(algorithm)) {
      PacketChannel<Lane> channel(lane);
      send_recv_push(channel, launch.to, launch.sent, launch.from, launch.received, args);
    } else {
      ChunkChannel<Lane> channel(lane);
      send_recv_push(channel, launch.to, launch.sent, launch.from, launch.received, args);
    }
  } else {
    unisono::run(lane, collective, algorithm, args);
  }
}

template <Collective collective, Algorithm algorithm, class Reduction>
__global__ void __launch_bounds__(kMaxThreads) program(const __grid_constant__ Launch launch) {
  using Lane = CudaBlock<Reduction>;
  typename Lane::Arrays arrays;
  Lane lane(launch.context, arrays);
  Args args = launch.args;
  args.inputs = launch.inputs;
  args.outputs = launch.outputs;
  args.sends = launch.by_parts ? launch.sends : nullptr;
  args.receives = launch.by_parts ? launch.receives : nullptr;
  run<collective, algorithm>(lane, launch, args);
  lane.finish();
}

template <Collective collective, Algorithm algorithm>
constexpr Kernel moves() {
  return program<collective, algorithm, Bytes>;
}

template <DType> struct Element;
template <> struct Element<DType::f32> { using type = float; };
template <> struct Element<DType::f64> { using type = double; };
template <> struct Element<DType::f16> { using type = F16; };
template <> struct Element<DType::bf16> { using type = BF16; };
template <> struct Element<DType::i8> { using type = std::int8_t; };
template <> struct Element<DType::u8> { using type = std::uint8_t; };
template <> struct Element<DType::i32> { using type = std::int32_t; };
template <> struct Element<DType::i64> { using type = std::int64_t; };
template <> struct Element<DType::f8e4m3> { using type = E4M3; };
template <> struct Element<DType::f8e5m2> { using type = E5M2; };

using Row = std::array<Kernel, kDTypes * kOps>;
template <Collective collective, Algorithm algorithm>
const Row& reductions() {
  static const Row row = []<std::size_t... i>(std::index_sequence<i...>) {
    return Row{program<collective, algorithm,
                       Combine<typename Element<static_cast<DType>(i / kOps)>::type, static_cast<Op>(i % kOps)>>...};
  }(std::make_index_sequence<TRY>{});
  return row;
}

}  // namespace

Kernel kernel(Collective collective, Algorithm algorithm, DType dtype, Op op) {
  using enum Algorithm;
  (void)dtype;(void)op;
  const std::size_t at = static_cast<std::size_t>(dtype)*kOps + static_cast<std::size_t>(op);
  switch (collective) {
    case Collective::barrier: return moves<Collective::barrier, automatic>();
    case Collective::broadcast: return moves<Collective::broadcast, push_packets>();
    case Collective::all_reduce: 
      switch (algorithm) {
        case one_shot_packets: return reductions<Collective::all_reduce, one_shot_packets>()[at];
        case one_shot: return reductions<Collective::all_reduce, one_shot>()[at];
        case two_shot: return reductions<Collective::all_reduce, two_shot>()[at];
        case two_shot_packets: return reductions<Collective::all_reduce, two_shot_packets>()[at];
        case two_shot_direct: return reductions<Collective::all_reduce, two_shot_direct>()[at];
        default:;
      }
    default: return nullptr;
  }
}

}  // namespace unisono::cuda
