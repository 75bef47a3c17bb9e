// From a call to what is enqueued for it.
#include <algorithm>

#include "lane/cuda/gpu_engine.hpp"
#include "unisono/error.hpp"
#include "wire.hpp"

namespace unisono::cuda {

bool GpuEngine::symmetric(const Request& request) const {
  if (!peer_access_) return false;
  const Args& a = request.args;
  const auto [in, out] = reached(request.collective);
  const bool swaps =
      request.collective == Collective::all_to_all || request.collective == Collective::send_recv;
  if ((!in && !out) || (swaps && request.in_place())) return false;
  auto lies = [&](const byte* at) { return at && place(at, a.bytes).allocation != Place::kNone; };
  return (!in || lies(a.in)) && (!out || lies(a.out));
}

std::size_t GpuEngine::unit_of(Collective collective, Algorithm algorithm, std::size_t bytes) const {
  const auto n = static_cast<std::size_t>(group_.size());
  using enum Algorithm;
  switch (collective) {
    case Collective::all_reduce:
      return algorithm == one_shot || algorithm == one_shot_packets || algorithm == one_shot_ll128
                 ? bytes
                 : bytes / n;
    case Collective::reduce:
    case Collective::broadcast:
      if (algorithm == scatter_all_gather) return bytes / n;
      return algorithm == direct || algorithm == two_shot_push || algorithm == two_shot_ll128
                 ? bytes / (n - 1)
                 : bytes;
    case Collective::all_to_all_v:  // no rank knows the longest of all
      return is_packets(algorithm) || is_lines(algorithm) ? std::size_t{256} << 10
                                                          : layout_.chunk_bytes * kMostBlocks;
    case Collective::send:
    case Collective::recv:
    case Collective::send_recv: return bytes;
    default: return bytes / n;
  }
}

Shape GpuEngine::wanted(const Shape& planned) const {
  return {asked_.blocks ? asked_.blocks : planned.blocks, asked_.threads ? asked_.threads : planned.threads,
          asked_.piece_bytes ? asked_.piece_bytes : planned.piece_bytes};
}

Shape GpuEngine::cut(Algorithm algorithm, const Shape& asked, std::size_t unit) const {
  const bool packets = is_packets(algorithm), lines = is_lines(algorithm);
  const std::size_t most = packets ? kPackets * kPacketBytes
                           : lines ? kPackets / kLineUnits * kLineBytes
                                   : layout_.chunk_bytes;
  // Lines: about 64 blocks, while their pieces are neither too small for their start nor too large for a
  // ring.
  const std::size_t share = asked.piece_bytes ? asked.piece_bytes
                            : packets         ? 1024
                            : lines           ? std::clamp<std::size_t>(round_up(unit / 64, 960), 1920, most)
                                              : 8192;
  const int most_blocks = lines ? std::min(blocks_, kMostLineBlocks) : blocks_;
  const auto limit = static_cast<std::size_t>(asked.blocks ? std::min(asked.blocks, blocks_) : most_blocks);
  const std::size_t align = packets ? kAlign
                            : lines ? 8 * kLineBytes
                                    : 1024;  // pieces begin at multiples of kAlign
  Shape shape;
  shape.blocks = static_cast<int>(std::clamp<std::size_t>((unit + share - 1) / share, 1, limit));
  const auto blocks = static_cast<std::size_t>(shape.blocks);
  shape.piece_bytes = std::clamp(round_up((unit + blocks - 1) / blocks, align), align, most);
  if (asked.piece_bytes) shape.piece_bytes = std::min(round_up(asked.piece_bytes, align), most);
  const std::size_t of_thread = packets ? kPacketBytes : lines ? kLineBytes / kLineUnits : 16;
  const std::size_t wanted = (shape.piece_bytes + of_thread - 1) / of_thread;
  shape.threads = asked.threads ? asked.threads
                                : static_cast<int>(std::clamp<std::size_t>(
                                      round_up(wanted, 32), packets || lines ? 32 : 128, kMaxThreads));
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

// A call as an exchange of one step: every rank gives each peer its part.
void GpuEngine::one_step(Exchange& x, const Request& request, int to, int from) const {
  const Args& a = request.args;
  const int n = group_.size(), me = group_.rank();
  const bool whole = request.collective == Collective::all_reduce ||
                     request.collective == Collective::reduce || request.collective == Collective::broadcast;
  std::size_t longest = whole ? a.bytes : a.block;
  auto give = [&](int p, const byte* data, std::size_t bytes) {
    (p == me ? x.own : x.from[p]) = data;
    (p == me ? x.own_bytes : x.send[p]) = static_cast<std::uint32_t>(bytes);
  };
  auto get = [&](int p, byte* data, std::size_t bytes) {
    (p == me ? x.result : x.into[p]) = data;
    (p == me ? x.own_bytes : x.receive[p]) = static_cast<std::uint32_t>(bytes);
  };
  auto at = [&](int p) { return a.block * static_cast<std::size_t>(p); };
  for (int p = 0; p < n; ++p) {
    const bool mine = p == me;
    switch (request.collective) {
      case Collective::all_reduce:
        give(p, a.in, a.bytes);
        get(p, mine ? a.out : nullptr, a.bytes);
        break;
      case Collective::reduce:
        if (p == a.root) give(p, a.in, a.bytes);
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
        if (p == a.root) give(p, a.in, a.block);
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
  x.one_source = request.collective == Collective::all_reduce ||
                 request.collective == Collective::all_gather ||
                 (request.collective == Collective::broadcast && me == a.root);
  if (longest >> 31 != 0)
    throw UsageError("packets carry messages below 2 GiB: leave algorithm out, or name another.");
  x.bytes = static_cast<std::uint32_t>(longest);
}

// As one of two: each owner gets its shard from everyone who has a part of it, and passes the result on. An
// all_reduce is everyone's; else the root has no shard.
void GpuEngine::two_steps(Exchange& x, const Request& request) const {
  const Args& a = request.args;
  const int n = group_.size(), me = group_.rank();
  const bool all = request.collective == Collective::all_reduce;
  auto gives = [&](int p) { return request.collective != Collective::broadcast || p == a.root; };
  auto gets = [&](int p) { return all || (request.collective == Collective::reduce) == (p == a.root); };
  auto share = [&](int p) {
    return all ? block_of(a.bytes, shard_bytes(a.bytes, n), p) : share_without(a.bytes, n, a.root, p);
  };
  auto narrow = [](std::size_t bytes) { return static_cast<std::uint32_t>(bytes); };
  const std::size_t longest = shard_bytes(a.bytes, all ? n : n - 1);
  if (longest >> 31 != 0)
    throw UsageError("packets carry shards below 2 GiB: leave algorithm out, or name another.");
  x.root = a.root;
  x.bytes = narrow(longest);
  const std::uint32_t mine = narrow(share(me).bytes);
  const bool copies = request.collective == Collective::broadcast && me == a.root && a.out != a.in;
  for (int p = 0; p < n; ++p) {
    const Range its = share(p);
    (p == me ? x.own : x.from[p]) = gives(me) ? a.in + its.begin : nullptr;
    (p == me ? x.result : x.into[p]) = gets(me) || copies ? a.out + its.begin : nullptr;
    if (p == me) continue;
    x.send[p] = gives(me) ? narrow(its.bytes) : 0;
    x.receive[p] = gives(p) ? mine : 0;
    x.pass[p] = gets(p) ? mine : 0;
    x.back[p] = gets(me) ? narrow(its.bytes) : 0;
  }
  x.own_bytes = mine;
}

void GpuEngine::exchange(const Request& request, Algorithm algorithm, const Shape& asked, std::uint64_t call,
                         int to, int from, cudaStream_t stream) const {
  const int n = group_.size(), me = group_.rank();
  const bool lines = is_lines(algorithm);
  Exchange x;
  Step step = Step::move;
  if (algorithm == Algorithm::two_shot_packets || algorithm == Algorithm::two_shot_ll128) {
    two_steps(x, request);
    step = request.collective == Collective::broadcast ? Step::relay : Step::two_shot;
  } else {
    one_step(x, request, to, from);
    if (request.collective == Collective::all_reduce || request.collective == Collective::reduce ||
        request.collective == Collective::reduce_scatter)
      step = Step::combine;
  }
  x.ranks = n;
  x.rank = me;
  x.dtype = request.call->dtype;
  x.op = request.call->op;
  if (step == Step::move && x.result == x.own) x.result = nullptr;
  const std::size_t area = lines ? layout_.lines : layout_.packets;
  auto at = [&](int p, std::size_t offset) { return base_.bases[p] + offset; };
  std::uintptr_t all =
      reinterpret_cast<std::uintptr_t>(x.own) | reinterpret_cast<std::uintptr_t>(x.result) | x.own_bytes;
  for (int p = 0; p < n; ++p) {
    all |= reinterpret_cast<std::uintptr_t>(x.from[p]) | reinterpret_cast<std::uintptr_t>(x.into[p]) |
           x.send[p] | x.receive[p] | x.back[p];
    if (p == me) continue;
    x.rings[p] = reinterpret_cast<Packet*>(at(p, area)) + static_cast<std::size_t>(me) * kPackets;
    x.tokens[p] = reinterpret_cast<Counts*>(at(p, layout_.tokens))->of + me;
  }
  x.arrived = reinterpret_cast<const Packet*>(at(me, area));
  x.begun = reinterpret_cast<Counts*>(at(me, layout_.tokens));
  x.counts = reinterpret_cast<Counts*>(at(me, layout_.counts));
  const bool whole = all % kPacketBytes == 0;
  x.context = base_;
  x.context.collective = request.collective;
  x.context.call = call;
  const Shape shape = cut(algorithm, asked, unit_of(request.collective, algorithm, request.args.bytes));
  x.piece_bytes = static_cast<std::uint32_t>(shape.piece_bytes);
  start(reinterpret_cast<const void*>(exchange_kernel(step, lines, whole, n, x.dtype, x.op)), &x, shape,
        stream);
}

void GpuEngine::run(const Request& request, Algorithm algorithm, const Shape& planned, std::uint64_t call,
                    int to, int from) {
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
  const Shape asked = wanted(planned);
  if (is_packets(algorithm) || is_lines(algorithm))
    return exchange(request, algorithm, asked, call, to, from, stream);
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
  if (algorithm == Algorithm::copy_engine && request.collective == Collective::all_reduce) {
    if (request.in_place())
      throw UsageError(
          "copy engines need an output apart from the input: leave algorithm out, or give another.");
    // whole shards, and what is left over
    const std::size_t even = args.bytes - args.bytes % (kAlign * static_cast<std::size_t>(n));
    if (even > 0) all_reduce_by_engine(launch, even, asked, stream);
    if (even == args.bytes) return;
    Request rest = request;
    rest.args.in += even;
    rest.args.out += even;
    rest.args.bytes -= even;
    return exchange(rest, Algorithm::one_shot_packets, {}, call, to, from, stream);
  }
  if (algorithm == Algorithm::copy_engine) return copy_by_engine(launch, request.collective, stream);
  if (const Wire as = request.call->wire; as != Wire::exact) {
    const std::size_t shard = wire::bytes_of(request.call->count) / static_cast<std::size_t>(n);
    return this->launch(quantised_kernel(launch.dtype, as), launch, cut(algorithm, asked, shard), stream);
  }
  const Kernel found = kernel(request.collective, algorithm, launch.dtype, launch.op);
  if (!found)
    throw UsageError(std::string(name_of(request.collective)) + " has no kernel for " +
                     std::string(name_of(algorithm)) + ": use another algorithm.");
  this->launch(found, launch, cut(algorithm, asked, unit_of(request.collective, algorithm, args.bytes)),
               stream);
}

// The copies to all peers go side by side, so that one's start is hidden behind the others, between two
// meetings of all ranks.
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

// Each rank's shards go to their owners, part by part and in the order of the ring (one peer's at a time
// comes in); what has come is combined by a kernel beside the copies, and the sums follow all shards the same
// way. Until its sum arrives, the place of a shard in the owner's output holds what that rank has sent.
void GpuEngine::all_reduce_by_engine(const Launch& launch, std::size_t bytes, const Shape& asked,
                                     cudaStream_t stream) {
  const Args& a = launch.args;
  const int n = group_.size(), me = group_.rank();
  constexpr std::size_t kPart = std::size_t{32} << 20;  // a copy's start costs as much as 4 MiB of it
  const std::size_t shard = bytes / static_cast<std::size_t>(n);
  const int parts = static_cast<int>(std::clamp<std::size_t>(shard / kPart, 1, kMostParts));
  const std::size_t part =
      round_up((shard + static_cast<std::size_t>(parts) - 1) / static_cast<std::size_t>(parts), kAlign);
  auto piece = [&](int owner, int index) {
    const Range in = block_of(shard, part, index);
    return Range{shard * static_cast<std::size_t>(owner) + in.begin, in.bytes};
  };
  auto copy = [&](byte* to, const byte* from, std::size_t size) {
    if (size > 0) check(cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream), "a copy");
  };
  meet(launch, stream);  // everyone's input is there, and every output may be written
  for (int index = 0; index < parts; ++index) {
    for (int i = 1; i < n; ++i) {
      const int p = (me + i) % n;
      const Range its = piece(p, index);
      copy(launch.outputs[p] + piece(me, index).begin, a.in + its.begin, its.bytes);
    }
    order(stream, side_, fork_);
    meet(launch, side_);
    const Range mine = piece(me, index);
    Launch sum = launch;
    sum.args.out = a.out + mine.begin;
    sum.args.bytes = mine.bytes;
    for (int p = 0; p < n; ++p) sum.inputs[p] = p == me ? a.in + mine.begin : a.out + piece(p, index).begin;
    this->launch(kernel(Collective::all_reduce, Algorithm::copy_engine, sum.dtype, sum.op), sum,
                 cut(Algorithm::copy_engine, asked, std::max<std::size_t>(mine.bytes, 1)), side_);
    meet(launch, side_);  // everyone has combined it: the sums may go where it came
    check(cudaEventRecord(combined_[index], side_), "ordering two streams");
  }
  for (int index = 0; index < parts; ++index) {
    check(cudaStreamWaitEvent(stream, combined_[index], 0), "ordering two streams");
    const Range mine = piece(me, index);
    for (int i = 1; i < n; ++i)
      copy(launch.outputs[(me + i) % n] + mine.begin, a.out + mine.begin, mine.bytes);
  }
  meet(launch, stream);
}

}  // namespace unisono::cuda
