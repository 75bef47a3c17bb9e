// From a call to what is enqueued for it.
#include <algorithm>

#include "lane/cuda/gpu_engine.hpp"
#include "unisono/error.hpp"

namespace unisono::cuda {

bool GpuEngine::symmetric(const Request& request) const {
  if (!peer_access_) return false;
  const Args& a = request.args;
  auto lies = [&](const byte* at, std::size_t bytes) {
    return at && place(at, bytes).allocation != Place::kNone;
  };
  switch (request.collective) {
    case Collective::all_reduce:
    case Collective::reduce:
    case Collective::broadcast: return lies(a.in, a.bytes) && lies(a.out, a.bytes);
    case Collective::all_gather:
    case Collective::gather: return lies(a.out, a.bytes);
    case Collective::reduce_scatter:
    case Collective::scatter: return lies(a.in, a.bytes);
    case Collective::all_to_all:
    case Collective::send_recv: return !request.in_place() && lies(a.out, a.bytes);
    default: return false;  // all_to_all_v: no rank knows the others' parts
  }
}

std::size_t GpuEngine::unit_of(Collective collective, Algorithm algorithm, std::size_t bytes) const {
  const auto n = static_cast<std::size_t>(group_.size());
  using enum Algorithm;
  switch (collective) {
    case Collective::all_reduce:
      return algorithm == one_shot || algorithm == one_shot_packets ? bytes : bytes / n;
    case Collective::reduce: return algorithm == direct ? bytes / (n - 1) : bytes;
    case Collective::broadcast:
      return algorithm == direct ? bytes / (n - 1) : algorithm == scatter_all_gather ? bytes / n : bytes;
    case Collective::all_to_all_v:  // no rank knows the longest of all
      return is_packets(algorithm) ? std::size_t{256} << 10 : layout_.chunk_bytes * kMostBlocks;
    case Collective::send:
    case Collective::recv:
    case Collective::send_recv: return bytes;
    default: return bytes / n;
  }
}

Shape GpuEngine::cut(Algorithm algorithm, std::size_t unit) const {
  const bool packets = is_packets(algorithm);
  const std::size_t most = packets ? kPackets * kPacketBytes : layout_.chunk_bytes;
  const std::size_t share = asked_.piece_bytes ? asked_.piece_bytes : packets ? 1024 : 8192;
  const auto limit = static_cast<std::size_t>(std::min(blocks_, asked_.blocks ? asked_.blocks : blocks_));
  const std::size_t align = packets ? kAlign : 1024;
  Shape shape;
  shape.blocks = static_cast<int>(std::clamp<std::size_t>((unit + share - 1) / share, 1, limit));
  const auto blocks = static_cast<std::size_t>(shape.blocks);
  shape.piece_bytes = std::clamp(round_up((unit + blocks - 1) / blocks, align), align, most);
  if (asked_.piece_bytes) shape.piece_bytes = std::min(round_up(asked_.piece_bytes, kAlign), most);
  const std::size_t wanted = shape.piece_bytes / (packets ? kPacketBytes : 16);  // a packet, or a pack, each
  shape.threads =
      asked_.threads
          ? asked_.threads
          : static_cast<int>(std::clamp<std::size_t>(round_up(wanted, 32), packets ? 32 : 128, kMaxThreads));
  return shape;
}

void GpuEngine::meet(const Launch& given, cudaStream_t stream) const {
  Launch launch = given;
  this->launch(kernel(Collective::barrier, Algorithm::automatic, DType::u8, Op::sum), launch,
               {1, 32 * kMaxRanks, kAlign}, stream);
}

void GpuEngine::order(cudaStream_t earlier, cudaStream_t later, cudaEvent_t event) const {
  check(cudaEventRecord(event, earlier), "ordering two streams");
  check(cudaStreamWaitEvent(later, event, 0), "ordering two streams");
}

void GpuEngine::take_turn(cudaStream_t stream) {
  if (any_ && stream != last_) { order(last_, stream, turn_); }
  last_ = stream;
  any_ = true;
}

void GpuEngine::start(const void* kernel, void* parameter, const Shape& shape, cudaStream_t stream) const {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t how{};
  how.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  how.blockDim = dim3(static_cast<unsigned>(shape.threads));
  how.stream = stream;
  how.attrs = &early;
  how.numAttrs = early_ ? 1 : 0;
  void* parameters[] = {parameter};
  check(cudaLaunchKernelExC(&how, kernel, parameters), "starting a kernel");
}

void GpuEngine::launch(Kernel kernel, Launch& launch, const Shape& shape, cudaStream_t stream) const {
  launch.context.piece_bytes = shape.piece_bytes;
  start(reinterpret_cast<const void*>(kernel), &launch, shape, stream);
}

// A call as one exchange of packets.
Exchange GpuEngine::exchange_of(const Request& request, Algorithm algorithm, int to, int from) const {
  const Args& a = request.args;
  const int n = group_.size(), me = group_.rank();
  Exchange x;
  x.ranks = n;
  x.rank = me;
  x.dtype = request.call->dtype;
  x.op = request.call->op;
  auto give = [&](int p, const byte* data, std::size_t bytes) {
    x.from[p] = data;
    x.send[p] = static_cast<std::uint32_t>(bytes);
  };
  auto get = [&](int p, byte* data, std::size_t bytes) {
    x.into[p] = data;
    x.receive[p] = static_cast<std::uint32_t>(bytes);
  };
  auto at = [&](int p) { return a.block * static_cast<std::size_t>(p); };
  std::size_t longest = a.block;
  for (int p = 0; p < n; ++p) {
    const bool mine = p == me;
    switch (request.collective) {
      case Collective::all_reduce:
        if (algorithm == Algorithm::two_shot_packets) {
          const Range s = block_of(a.bytes, longest = shard_bytes(a.bytes, n), p);
          give(p, a.in + s.begin, s.bytes);
          get(p, a.out + s.begin, s.bytes);
        } else {
          give(p, a.in, a.bytes);
          get(p, mine ? a.out : nullptr, a.bytes);
        }
        break;
      case Collective::reduce:
        if (mine || p == a.root) give(p, a.in, a.bytes);
        if (me == a.root) get(p, mine ? a.out : nullptr, a.bytes);
        break;
      case Collective::broadcast:
        if (me == a.root) give(p, a.in, a.bytes);
        if (p == a.root) get(p, a.out, a.bytes);
        break;
      case Collective::all_gather:
        give(p, a.in, a.block);
        get(p, a.out + at(p), a.block);
        break;
      case Collective::gather:
        if (mine || p == a.root) give(p, a.in, a.block);
        if (me == a.root) get(p, a.out + at(p), a.block);
        break;
      case Collective::reduce_scatter:
        give(p, a.in + at(p), a.block);
        get(p, mine ? a.out : nullptr, a.block);
        break;
      case Collective::scatter:
        if (me == a.root) give(p, a.in + at(p), a.block);
        if (p == a.root) get(p, a.out, a.block);
        break;
      case Collective::all_to_all:
        give(p, a.in + at(p), a.block);
        get(p, a.out + at(p), a.block);
        break;
      case Collective::all_to_all_v: {
        const Args::Part& sent = a.sends[p];
        const Args::Part& received = a.receives[p];
        give(p, a.in + sent.offset, sent.bytes);
        get(p, a.out + received.offset, received.bytes);
        longest = std::max({longest, sent.bytes, received.bytes});
        break;
      }
      default:  // send, recv, send_recv
        longest = a.bytes;
        if (p == to) give(p, a.in, a.bytes);
        if (p == from) get(p, a.out, a.bytes);
    }
  }
  const bool whole = request.collective == Collective::reduce ||
                     request.collective == Collective::broadcast ||
                     request.collective == Collective::all_reduce;
  if (whole && algorithm != Algorithm::two_shot_packets) longest = a.bytes;
  if (longest >> 31 != 0)
    throw UsageError("packets carry messages below 2 GiB: leave algorithm out, or name one without packets.");
  x.bytes = static_cast<std::uint32_t>(longest);
  x.one_source = (request.collective == Collective::all_reduce && algorithm != Algorithm::two_shot_packets) ||
                 (request.collective == Collective::broadcast && me == a.root) ||
                 request.collective == Collective::all_gather;
  std::uintptr_t all = 0;
  for (int p = 0; p < n; ++p) {
    all |= reinterpret_cast<std::uintptr_t>(x.from[p]) | reinterpret_cast<std::uintptr_t>(x.into[p]);
    x.rings[p] = base_.bases[p] + layout_.packets + static_cast<std::size_t>(me) * kPackets * sizeof(Packet);
  }
  x.aligned = all % kPacketBytes == 0;
  x.context = base_;
  return x;
}

void GpuEngine::run(const Request& request, Algorithm algorithm, std::uint64_t call, int to, int from) {
  const OnDevice on(device_);
  auto* const stream = static_cast<cudaStream_t>(request.call->stream);
  const Args& args = request.args;
  const int n = group_.size(), me = group_.rank();
  if (n == 1 || (to == me && from == me)) {
    if (args.in != args.out && args.bytes > 0)
      check(cudaMemcpyAsync(args.out, args.in, args.bytes, cudaMemcpyDeviceToDevice, stream), "a copy");
    return;
  }
  take_turn(stream);
  if (is_packets(algorithm)) {
    Exchange x = exchange_of(request, algorithm, to, from);
    x.context.collective = request.collective;
    x.context.call = call;
    const Shape shape = cut(algorithm, unit_of(request.collective, algorithm, args.bytes));
    x.piece_bytes = static_cast<std::uint32_t>(shape.piece_bytes);
    const bool combines = request.collective == Collective::all_reduce ||
                          request.collective == Collective::reduce ||
                          request.collective == Collective::reduce_scatter;
    const Step step = algorithm == Algorithm::two_shot_packets ? Step::two_shot
                      : combines                               ? Step::combine
                                                               : Step::move;
    return start(reinterpret_cast<const void*>(exchange_kernel(step, n, x.dtype, x.op)), &x, shape, stream);
  }
  Launch launch;
  launch.context = base_;
  launch.context.collective = request.collective;
  launch.context.call = call;
  launch.dtype = request.call->dtype;
  launch.op = request.call->op;
  launch.args = args;
  launch.to = std::max(to, 0);
  launch.from = std::max(from, 0);
  launch.sent = to < 0 ? 0 : args.bytes;
  launch.received = from < 0 ? 0 : args.bytes;
  if (request.collective == Collective::all_to_all_v) {
    launch.by_parts = true;
    std::copy_n(request.sends.begin(), n, launch.sends);
    std::copy_n(request.receives.begin(), n, launch.receives);
  }
  if (is_direct(algorithm)) {
    auto reach = [&](const void* at, int rank) -> byte* {
      const Place mine = place(static_cast<const byte*>(at), 0);
      if (mine.allocation == Place::kNone) return nullptr;
      const std::scoped_lock lock(mutex_);
      return allocations_.at(mine.allocation)[static_cast<std::size_t>(rank)]->data() + mine.offset;
    };
    for (int r = 0; r < n; ++r) {
      launch.inputs[r] = reach(args.in, r);
      launch.outputs[r] = reach(args.out, r);
    }
  }
  if (algorithm == Algorithm::copy_engine && request.collective == Collective::all_reduce)
    return all_reduce_by_engine(launch, stream);
  if (algorithm == Algorithm::copy_engine) return copy_by_engine(launch, request.collective, stream);
  const Kernel found = kernel(request.collective, algorithm, launch.dtype, launch.op);
  if (!found)
    throw UsageError(std::string(name_of(request.collective)) + " has no kernel for " +
                     std::string(name_of(algorithm)) + ": use another algorithm.");
  this->launch(found, launch, cut(algorithm, unit_of(request.collective, algorithm, args.bytes)), stream);
}

// The copies go in the order of the ring, one peer at a time, between two meetings of all ranks; this rank's
// own block goes beside them.
void GpuEngine::copy_by_engine(const Launch& launch, Collective collective, cudaStream_t stream) {
  const Args& a = launch.args;
  const int n = group_.size(), me = group_.rank();
  struct Copy {
    byte* to;
    const byte* from;
    std::size_t bytes;
  };
  auto block = [&](int p) { return a.block * static_cast<std::size_t>(p); };
  auto copy_to = [&](int p) -> Copy {
    switch (collective) {
      case Collective::all_gather: return {launch.outputs[p] + block(me), a.in, a.block};
      case Collective::all_to_all: return {launch.outputs[p] + block(me), a.in + block(p), a.block};
      case Collective::gather: return {p == a.root ? launch.outputs[p] + block(me) : nullptr, a.in, a.block};
      case Collective::scatter:  // each takes its own
        return {p == a.root ? a.out : nullptr, (me == a.root ? a.in : launch.inputs[p]) + block(me), a.block};
      default: return {me == a.root ? launch.outputs[p] : nullptr, a.in, a.bytes};  // broadcast
    }
  };
  auto copy = [&](const Copy& one, cudaStream_t on) {
    if (one.to && one.to != one.from && one.bytes > 0)
      check(cudaMemcpyAsync(one.to, one.from, one.bytes, cudaMemcpyDeviceToDevice, on), "a copy");
  };
  meet(launch, stream);
  order(stream, side_, fork_);
  copy(copy_to(me), side_);
  for (int i = 1; i < n; ++i) copy(copy_to((me + i) % n), stream);
  order(side_, stream, join_);
  meet(launch, stream);
}

// Chunk by chunk: each rank's shards go to their owners' staging in the order of the ring (one peer's at a
// time comes in), are combined there by a kernel, and the sums go back the same way. Copies are on the
// caller's stream, kernels on another: while one chunk is combined the copies of its neighbours go on.
void GpuEngine::all_reduce_by_engine(const Launch& launch, cudaStream_t stream) {
  const Args& a = launch.args;
  const int n = group_.size(), me = group_.rank();
  const std::size_t staging = layout_.counters - layout_.chunks;  // the rings of chunks: nobody uses them now
  const std::size_t most = staging / (2 * static_cast<std::size_t>(n - 1)) / kAlign * kAlign;
  const std::size_t shard = shard_bytes(a.bytes, n);
  const std::size_t chunks = std::max<std::size_t>(2, (shard + most - 1) / most);
  const std::size_t step = round_up((shard + chunks - 1) / chunks, kAlign);
  auto copy = [&](byte* to, const byte* from, std::size_t bytes) {
    if (bytes > 0) check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream), "a copy");
  };
  auto piece = [&](int owner, std::size_t chunk) {  // of the whole buffer
    const Range s = block_of(a.bytes, shard, owner);
    const Range in = block_of(s.bytes, step, static_cast<int>(chunk));
    return Range{s.begin + in.begin, in.bytes};
  };
  auto stage = [&](int owner, int writer, std::size_t chunk) {  // an owner has one of each writer, twice
    const auto index =
        static_cast<std::size_t>((writer - owner + n) % n - 1) + chunk % 2 * static_cast<std::size_t>(n - 1);
    return base_.bases[owner] + layout_.chunks + index * most;
  };
  auto give = [&](std::size_t chunk) {
    for (int i = 1; i < n; ++i) {
      const int p = (me + i) % n;
      const Range s = piece(p, chunk);
      copy(stage(p, me, chunk), a.in + s.begin, s.bytes);
    }
  };
  auto combine = [&](std::size_t chunk) {
    const Range mine = piece(me, chunk);
    Launch sum = launch;
    sum.args.out = a.out + mine.begin;
    sum.args.bytes = mine.bytes;
    for (int p = 0; p < n; ++p) sum.inputs[p] = p == me ? a.in + mine.begin : stage(me, p, chunk);
    this->launch(kernel(Collective::all_reduce, Algorithm::copy_engine, sum.dtype, sum.op), sum,
                 cut(Algorithm::copy_engine, std::max<std::size_t>(mine.bytes, 1)), side_);
  };
  auto give_back = [&](std::size_t chunk) {
    const Range mine = piece(me, chunk);
    for (int i = 1; i < n; ++i)
      copy(launch.outputs[(me + i) % n] + mine.begin, a.out + mine.begin, mine.bytes);
  };

  meet(launch, stream);  // everyone's input is there, and nobody uses the staging
  give(0);
  for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
    order(stream, side_, fork_);  // this chunk's shards have gone; of all ranks, after the meeting
    if (chunk > 0) give_back(chunk - 1);
    meet(launch, side_);
    // everyone has combined the last chunk, whose staging the next one takes
    if (chunk > 0 && chunk + 1 < chunks) order(side_, stream, met_);
    combine(chunk);
    if (chunk + 1 < chunks) give(chunk + 1);
    check(cudaEventRecord(join_, side_), "ordering two streams");
    check(cudaStreamWaitEvent(stream, join_, 0), "ordering two streams");
  }
  give_back(chunks - 1);
  meet(launch, stream);
}

}  // namespace unisono::cuda
