// A call on GPU memory: one kernel that sums and does the rest, or the communicator's all_reduce and a kernel
// for the rest.
#include <algorithm>
#include <bit>
#include <limits>
#include <string>

#include "base/scales.hpp"
#include "cuda/api.hpp"
#include "cuda/engine.hpp"
#include "fused/cuda/norm.hpp"
#include "fused/engine.hpp"
#include "unisono/error.hpp"

namespace unisono::fused {
namespace {

constexpr std::size_t kLeastPart = 1024;  // bytes of a row, of each block of a cluster
constexpr int kFewestThreads = 256, kMostFinishing = 1024;
constexpr std::size_t kFewRows = 256;  // of a kernel with a block of so many threads for each
constexpr std::size_t kFewestOwned =
    10;  // rows of an owner for which a second step pays (docs/notes/fused.md)

std::uintptr_t number(const void* at) { return reinterpret_cast<std::uintptr_t>(at); }

bool runs_apart(Communicator::Impl& impl, const Task& task, Algorithm planned) {
  if (task.ranks > cuda::kFewRanks || !impl.machine() || task.call.algorithm == NormAlgorithm::apart)
    return true;
  return task.call.algorithm == NormAlgorithm::automatic && !is_packets(planned) && !is_lines(planned);
}

// Returns where the sums of an all_reduce go: an output whose bytes are as many, and that is no input of the
// kernel.
byte* place_of_sums(const Task& task) {
  const NormCall& call = task.call;
  if (call.quant == NormQuant::none && call.out != call.residual) return task.out(0);
  return task.residual_out(0);
}

gpu::Work work_of(const Task& task) {
  const NormCall& call = task.call;
  const std::size_t vector = 8 * size_of(call.dtype), out_vector = call.quant == NormQuant::none ? vector : 8;
  const std::uintptr_t places = number(call.x) | number(call.residual) | number(call.weight) |
                                number(call.bias) | number(call.residual_out) | task.row_bytes;
  return {.residual = task.residual(0),
          .weight = static_cast<const byte*>(call.weight),
          .bias = static_cast<const byte*>(call.bias),
          .residual_out = task.residual_out(0),
          .out = task.out(0),
          .scales = task.scales(0),
          .row_bytes = task.row_bytes,
          .scale_bytes = task.scale_bytes,
          .hidden = static_cast<unsigned>(call.hidden),
          .eps = call.eps,
          .inverse = 1 / call.scale,
          .quant = call.quant,
          .layer = task.kind == host::Norm::layer,
          .whole = places % vector == 0 && number(call.out) % out_vector == 0};
}

// Returns whether a kernel may hold rows in registers.
bool in_registers(const gpu::Work& work) {
  return work.hidden > gpu::kNotShort && work.hidden <= gpu::kMostShort && work.whole && !work.layer;
}

// Returns the bytes of a share of a row in shared memory, if those of `rows` rows fit; else 0.
unsigned held_bytes(const Task& task, unsigned elements, std::size_t rows) {
  const std::size_t bytes = round_up(elements * size_of(task.call.dtype), 32);
  return rows * bytes <= gpu::kMostShared ? static_cast<unsigned>(bytes) : 0;
}

// Enqueues the kernel that follows an all_reduce.
void finish(cuda::Engine& engine, const Task& task, const byte* sums) {
  gpu::Finish finish{work_of(task), sums, held_bytes(task, static_cast<unsigned>(task.call.hidden), 1)};
  finish.work.whole = finish.work.whole && number(sums) % (8 * size_of(task.call.dtype)) == 0;
  const std::size_t hidden = task.call.hidden, rows = task.call.rows;
  const bool few = hidden > gpu::kNotShort && rows <= kFewRows;
  if (rows <= kFewRows && in_registers(finish.work))
    return engine.start(gpu::short_rows_kernel(task.call.dtype, task.call.quant, hidden), &finish,
                        {.blocks = static_cast<int>(rows), .threads = kFewestThreads}, task.call.stream);
  // many threads for the time of a few rows, few for the rate of many
  const int threads = few ? kMostFinishing : kFewestThreads;
  engine.start(gpu::finish_kernel(task.call.dtype, threads, finish.work.whole && finish.row_bytes > 0),
               &finish,
               {.blocks = static_cast<int>(rows), .threads = threads, .shared_bytes = finish.row_bytes},
               task.call.stream);
}

void run_apart(Communicator::Impl& impl, cuda::Engine& engine, const Task& task) {
  const NormCall& call = task.call;
  const byte* sums = task.x(0);
  if (task.ranks > 1) {
    byte* const to = place_of_sums(task);
    const Call sum{.in = call.x,
                   .out = to,
                   .count = call.rows * call.hidden,
                   .dtype = call.dtype,
                   .memory = Memory::device,
                   .stream = call.stream};
    impl.run_within({Collective::all_reduce, sum, impl.rank(), impl.size()});
    sums = to;
  } else {
    engine.take(call.stream);
  }
  finish(engine, task, sums);
}

// Returns how many blocks of a cluster share a row, alike on all ranks: whole words, of which messages are
// made. Clusters that leave a quarter of the blocks free are faster than twice as large ones
// (docs/notes/fused.md).
unsigned cluster_of(const Task& task, std::size_t rows, std::size_t most_blocks) {
  const std::size_t hidden = task.call.hidden;
  unsigned cluster = task.row_bytes % cuda::kPacketBytes == 0 ? 8 : 1;
  const auto pays = [&] {
    return 4 * rows * cluster <= 3 * most_blocks && task.row_bytes >= cluster * kLeastPart &&
           norm::kPartials - norm::kPartials / cluster < hidden;
  };
  while (cluster > 1 && !pays()) cluster /= 2;
  return cluster;
}

void run_fused(Communicator::Impl& impl, cuda::Engine& engine, const Task& task, Algorithm planned) {
  const NormCall& call = task.call;
  const int most_blocks = engine.take(call.stream);
  const bool asked = call.algorithm != NormAlgorithm::automatic;
  const bool lines = asked ? call.algorithm == NormAlgorithm::one_shot_ll128 ||
                                 call.algorithm == NormAlgorithm::two_shot_ll128
                           : is_lines(planned);
  const bool two_steps =
      asked ? call.algorithm == NormAlgorithm::two_shot || call.algorithm == NormAlgorithm::two_shot_ll128
            : form_of(planned) == Algorithm::two_shot && task.owned_by(0).count >= kFewestOwned;
  const std::size_t steps = two_steps ? task.owned_by(0).count : call.rows;
  const std::size_t at_a_time = two_steps ? static_cast<std::size_t>(task.ranks) : 1;
  const unsigned cluster =
      cluster_of(task, steps, engine.clusters() ? static_cast<std::size_t>(most_blocks) : 0);
  const auto bits = gpu::kRowBits - static_cast<unsigned>(std::countr_zero(cluster));
  const gpu::Share largest(0, bits, static_cast<unsigned>(call.hidden));
  gpu::SumAndFinish of{.x = engine.exchange_of(Collective::all_reduce_rms_norm, lines, impl.calls()),
                       .work = work_of(task),
                       .rows = task.x(0),
                       .count = call.rows,
                       .steps = static_cast<unsigned>(steps),
                       .cluster = cluster,
                       .bits = bits,
                       .row_bytes = held_bytes(task, largest.count, at_a_time)};
  for (int p = 0; p < task.ranks - 1; ++p) of.x.gives.add(p, task.rank);
  if (two_steps) of.x.passes = of.x.gives;
  const std::size_t of_thread = lines ? cuda::kLineUnit : cuda::kPacketBytes;
  const std::size_t share_bytes = largest.count * size_of(call.dtype);
  const std::size_t wanted = round_up((share_bytes + of_thread - 1) / of_thread, 32);
  const int threads = std::clamp(static_cast<int>(wanted), kFewestThreads, cuda::kMaxThreads);
  of.x.piece_bytes = static_cast<unsigned>(static_cast<std::size_t>(threads) * of_thread);
  const std::size_t teams = std::min(steps, static_cast<std::size_t>(most_blocks) / cluster);
  const bool whole = (number(call.x) | number(call.residual) | number(call.residual_out) | task.row_bytes) %
                         cuda::kPacketBytes ==
                     0;
  const gpu::Form form{lines, whole, task.ranks, call.dtype};
  const void* kernel = nullptr;
  if (!two_steps && teams == call.rows && of.row_bytes > 0 && in_registers(of.work)) {
    const auto messages = static_cast<unsigned>((share_bytes + of.x.piece_bytes - 1) / of.x.piece_bytes);
    const auto short_kernel = lines ? gpu::short_one_step_by_lines : gpu::short_one_step_by_packets;
    kernel = short_kernel(form, cluster, messages);
  }
  if (kernel == nullptr) kernel = (two_steps ? gpu::two_steps_kernel : gpu::one_step_kernel)(form);
  engine.start(kernel, &of,
               {.blocks = static_cast<int>(teams * cluster),
                .threads = threads,
                .cluster = cluster,
                .shared_bytes = at_a_time * of.row_bytes},
               call.stream);
}

}  // namespace

void check_for_gpu(Communicator::Impl& impl, const Task& task) {
  const NormCall& call = task.call;
  if (call.sharded)
    throw UsageError("a sharded residual is for arrays on CPUs: give all of it on every rank.");
  if (!impl.gpu())
    throw UsageError(
        "a norm of GPU memory needs a communicator with a GPU: make it with device=, on every rank.");
  if (call.rows > static_cast<std::size_t>(std::numeric_limits<int>::max()) || task.row_bytes > std::size_t{1}
                                                                                                    << 31)
    throw UsageError(std::to_string(call.rows) + " rows of " + std::to_string(call.hidden) +
                     " are more than a GPU's kernel takes: split the call.");
  const bool asked = call.algorithm != NormAlgorithm::automatic && call.algorithm != NormAlgorithm::apart;
  if (asked && task.ranks > cuda::kFewRanks)
    throw UsageError(std::string(name_of(call.algorithm)) + " is for up to " +
                     std::to_string(cuda::kFewRanks) + " GPUs: leave the algorithm out.");
  if ((call.algorithm == NormAlgorithm::one_shot_ll128 || call.algorithm == NormAlgorithm::two_shot_ll128) &&
      !impl.gpu()->nvlink())
    throw UsageError(std::string(name_of(call.algorithm)) +
                     " needs peer access over NVLink: use one_shot or two_shot, or leave the algorithm out.");
  if (call.quant != NormQuant::none && call.residual_out == call.residual && call.rows > 0 &&
      task.ranks > 1 &&
      runs_apart(impl, task,
                 impl.choose(Collective::all_reduce_rms_norm, call.rows * task.row_bytes, false,
                             Memory::device, false)))
    throw UsageError(
        "residual_out is residual, which a norm with quant apart from the all_reduce cannot take: give it "
        "memory of its own.");
}

void run_on_gpu(Communicator::Impl& impl, const Task& task, Algorithm planned) {
  cuda::Engine& engine = *impl.gpu();
  const cuda::OnDevice on(engine.device());
  if (task.ranks == 1 || runs_apart(impl, task, planned)) run_apart(impl, engine, task);
  else run_fused(impl, engine, task, planned);
}

void load_for_gpu(Communicator::Impl& impl) {
  const cuda::OnDevice on(impl.gpu()->device());
  gpu::load(impl.size());
}

}  // namespace unisono::fused
