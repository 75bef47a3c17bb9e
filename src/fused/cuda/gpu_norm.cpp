// A call on GPU memory: one kernel that sums and does the rest, or the communicator's all_reduce and a kernel
// for the rest.
#include <algorithm>
#include <limits>
#include <string>

#include "base/scales.hpp"
#include "cuda/api.hpp"
#include "cuda/engine.hpp"
#include "fused/cuda/norm.hpp"
#include "fused/cuda/norm_form.hpp"
#include "fused/engine.hpp"
#include "unisono/error.hpp"

namespace unisono::fused {
namespace {

constexpr int kMostFinishing = 1024;   // threads of a block
constexpr std::size_t kFewRows = 256;  // of a kernel with a block of so many threads for each

std::uintptr_t number(const void* at) { return reinterpret_cast<std::uintptr_t>(at); }

// Returns where the sums of an all_reduce go. Requires: can_run_apart.
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

// Enqueues the kernel that follows an all_reduce.
void finish(cuda::Engine& engine, const Task& task, const byte* sums) {
  gpu::Finish finish{work_of(task), sums, held_bytes(task, static_cast<unsigned>(task.call.hidden), 1)};
  finish.work.whole = finish.work.whole && number(sums) % (8 * size_of(task.call.dtype)) == 0;
  const std::size_t hidden = task.call.hidden, rows = task.call.rows;
  const bool few = hidden > gpu::kNotShort && rows <= kFewRows;
  if (rows <= kFewRows && finish.work.whole && short_rows(task.call, task.kind))
    return engine.start(gpu::short_rows_kernel(task.call.dtype, task.call.quant, hidden), &finish,
                        {.blocks = static_cast<int>(rows), .threads = gpu::kFewestThreads}, task.call.stream);
  // many threads for the time of a few rows, few for the rate of many
  const int threads = few ? kMostFinishing : gpu::kFewestThreads;
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

Gpus gpus_of(const cuda::Engine& engine) {
  return {static_cast<std::size_t>(engine.most_blocks()), engine.clusters(), engine.nvlink()};
}

Algorithm algorithm_of(Communicator::Impl& impl, const Task& task, Algorithm planned) {
  return impl.machine() ? algorithm_of(task, gpus_of(*impl.gpu()), planned) : Algorithm::automatic;
}

void run_fused(Communicator::Impl& impl, cuda::Engine& engine, const Task& task, Algorithm algorithm) {
  const NormCall& call = task.call;
  engine.take(call.stream);
  const Cut cut = cut_of(task, gpus_of(engine), algorithm);
  gpu::SumAndFinish of{.x = engine.exchange_of(Collective::all_reduce_rms_norm, cut.lines, impl.calls()),
                       .work = work_of(task),
                       .rows = task.x(0),
                       .count = call.rows,
                       .steps = static_cast<unsigned>(cut.steps),
                       .cluster = cut.cluster,
                       .bits = cut.bits,
                       .row_bytes = cut.row_bytes};
  for (int p = 0; p < task.ranks - 1; ++p) of.x.gives.add(p, task.rank);
  if (cut.two_steps) of.x.passes = of.x.gives;
  of.x.piece_bytes = static_cast<unsigned>(cut.piece_bytes);
  const bool whole = (number(call.x) | number(call.residual) | number(call.residual_out) | task.row_bytes) %
                         cuda::kPacketBytes ==
                     0;
  const gpu::Form form{cut.lines, whole, task.ranks, call.dtype};
  const auto kernel_in_registers = cut.lines ? gpu::short_one_step_by_lines : gpu::short_one_step_by_packets;
  const void* const kernel = whole && of.work.whole && cut.in_registers
                                 ? kernel_in_registers(form, cut.cluster, cut.messages)
                                 : (cut.two_steps ? gpu::two_steps_kernel : gpu::one_step_kernel)(form);
  engine.start(kernel, &of,
               {.blocks = static_cast<int>(cut.teams * cut.cluster),
                .threads = cut.threads,
                .cluster = cut.cluster,
                .shared_bytes = cut.at_a_time * of.row_bytes},
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
  if (!can_run_apart(task) && call.rows > 0 && task.ranks > 1 &&
      runs_apart(algorithm_of(impl, task, by_plan(impl, task))))
    throw UsageError(
        "residual_out is residual, which a norm with quant apart from the all_reduce cannot take: give it "
        "memory of its own.");
}

void run_on_gpu(Communicator::Impl& impl, const Task& task, Algorithm planned) {
  cuda::Engine& engine = *impl.gpu();
  const cuda::OnDevice on(engine.device());
  const Algorithm algorithm = algorithm_of(impl, task, planned);
  if (runs_apart(algorithm)) run_apart(impl, engine, task);
  else run_fused(impl, engine, task, algorithm);
}

void load_for_gpu(Communicator::Impl& impl) {
  const cuda::OnDevice on(impl.gpu()->device());
  gpu::load(impl.size());
}

}  // namespace unisono::fused
