// A call on GPU memory: the communicator's all_reduce, then one kernel.
#include <limits>
#include <optional>

#include "cuda/api.hpp"
#include "fused/cuda/norm.hpp"
#include "fused/engine.hpp"
#include "unisono/error.hpp"

namespace unisono::fused {
namespace {

// Returns where the sums go: an output whose bytes are as many, and that is no input of the kernel.
byte* place_of_sums(const Task& task) {
  const NormCall& call = task.call;
  if (call.quant == NormQuant::none && call.out != call.residual) return task.out(0);
  return task.residual_out(0);
}

}  // namespace

void check_for_gpu(const Task& task) {
  const NormCall& call = task.call;
  if (call.algorithm == NormAlgorithm::one_shot || call.algorithm == NormAlgorithm::two_shot)
    throw UsageError("one_shot and two_shot are for arrays on CPUs: leave the algorithm out.");
  if (call.sharded)
    throw UsageError("a sharded residual is for arrays on CPUs: give all of it on every rank.");
  if (call.quant != NormQuant::none && call.residual_out == call.residual && call.rows > 0 && task.ranks > 1)
    throw UsageError(
        "residual_out is residual, which a call with quant on a GPU cannot take: give it memory of its own.");
  if (call.rows > static_cast<std::size_t>(std::numeric_limits<int>::max()))
    throw UsageError(std::to_string(call.rows) + " rows are more than a GPU's kernel takes: split the call.");
}

void run_on_gpu(Communicator::Impl& impl, const Task& task) {
  const NormCall& call = task.call;
  const std::optional<int> device = impl.device();
  if (!device)
    throw UsageError(
        "a norm of GPU memory needs a communicator with a GPU: make it with device=, on every rank.");
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
    impl.take_gpu(call.stream);
  }
  const auto number = [](const void* at) { return reinterpret_cast<std::uintptr_t>(at); };
  const std::size_t vector = 8 * size_of(call.dtype);
  const std::uintptr_t places = number(sums) | number(call.residual) | number(call.weight) |
                                number(call.bias) | number(call.residual_out) | task.row_bytes;
  const std::size_t out_vector = call.quant == NormQuant::none ? vector : 8;
  const gpu::Work work{.sums = sums,
                       .residual = task.residual(0),
                       .weight = static_cast<const byte*>(call.weight),
                       .bias = static_cast<const byte*>(call.bias),
                       .residual_out = task.residual_out(0),
                       .out = task.out(0),
                       .scales = task.scales(0),
                       .hidden = call.hidden,
                       .row_bytes = task.row_bytes,
                       .scale_bytes = task.scale_bytes,
                       .eps = call.eps,
                       .inverse = 1 / call.scale,
                       .quant = call.quant,
                       .whole = places % vector == 0 && number(call.out) % out_vector == 0};
  const cuda::OnDevice on(*device);
  cuda::check(gpu::finish(work, call.rows, call.dtype, task.kind == host::Norm::layer,
                          static_cast<cudaStream_t>(call.stream)),
              "starting the kernel of a norm");
}

}  // namespace unisono::fused
