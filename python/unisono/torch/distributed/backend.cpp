// The torch.distributed backend `unisono`: c10d's collectives as calls of a communicator. Contiguity is a
// rank's own affair: copies are local.
#include <torch/csrc/utils/pybind.h>

#include "routes.hpp"
#include "tensors.hpp"

namespace unisono_torch {
namespace {

using c10d::OpType;
using unisono::Collective;

}  // namespace

class Backend final : public Routes {
 public:
  using Routes::Routes;

  Ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    one(tensors, "all_reduce");
    if (const auto inner = elsewhere(tensors, "all_reduce", &opts.reduceOp))
      return joined(inner->allreduce(tensors, opts));
    return reduce_all(tensors, opts, OpType::ALLREDUCE);
  }
  Ptr<c10d::Work> allreduce_coalesced(Tensors& tensors,
                                      const c10d::AllreduceCoalescedOptions& opts) override {
    if (const auto inner = elsewhere(tensors, "all_reduce", &opts.reduceOp))
      return joined(inner->allreduce_coalesced(tensors, opts));
    return reduce_all(tensors, opts, OpType::ALLREDUCE_COALESCED);
  }
  Ptr<c10d::Work> allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return joined(elsewhere(tensors, "all_reduce", &opts.reduceOp)->allreduce_sparse(tensors, opts));
  }

  Ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    const at::Tensor& tensor = one(tensors, "broadcast");
    if (const auto inner = elsewhere(tensors, "broadcast")) return joined(inner->broadcast(tensors, opts));
    const int root = root_of(opts.rootRank);
    return begin(OpType::BROADCAST, "unisono:broadcast", opts, tensors, tensors, [&](Steps& call) {
      const at::Tensor at = rank_ == root ? packed(tensor) : written(call, tensor);
      void* const data = call.keep(at).data_ptr();
      call.run(Collective::broadcast, bytes(data, data, tensor.nbytes(), root));
    });
  }

  Ptr<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    const at::Tensor& tensor = one(tensors, "reduce");
    if (const auto inner = elsewhere(tensors, "reduce", &opts.reduceOp))
      return joined(inner->reduce(tensors, opts));
    const int root = root_of(opts.rootRank);
    const Sum sum = *sum_of(tensor, opts.reduceOp);
    return begin(OpType::REDUCE, "unisono:reduce", opts, tensors, tensors,
                 [&](Steps& call) { reduce_to(call, tensor, tensor, sum, root); });
  }

  Ptr<c10d::Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                            const c10d::AllgatherOptions& opts) override {
    const at::Tensor& in = one(inputs, "all_gather");
    const Tensors& outs = one(outputs, ranks(), "all_gather");
    if (const auto inner = elsewhere(inputs, "all_gather"))
      return joined(inner->allgather(outputs, inputs, opts));
    check_alike(outs, in, "all_gather");
    return begin(OpType::ALLGATHER, "unisono:all_gather", opts, inputs, outs,
                 [&](Steps& call) { gather_lists(call, in, outs); });
  }
  Ptr<c10d::Work> allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                      const c10d::AllgatherOptions& opts) override {
    if (const auto inner = elsewhere(inputs, "all_gather"))
      return joined(inner->allgather_coalesced(outputs, inputs, opts));
    // outputs[r][i] is what rank r gives as inputs[i]
    TORCH_CHECK(outputs.size() == ranks(), "unisono: all_gather needs ", ranks(), " lists, not ",
                outputs.size(), ".");
    std::vector<Tensors> of_inputs(inputs.size());
    Tensors all;
    for (const Tensors& list : outputs) {
      TORCH_CHECK(list.size() == inputs.size(),
                  "unisono: all_gather needs lists as long as that of the inputs.");
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        check_alike(list[i], inputs[i], 1, "all_gather");
        of_inputs[i].push_back(list[i]);
        all.push_back(list[i]);
      }
    }
    return begin(OpType::ALLGATHER_COALESCED, "unisono:all_gather", opts, inputs, all, [&](Steps& call) {
      for (std::size_t i = 0; i < inputs.size(); ++i) gather_lists(call, inputs[i], of_inputs[i]);
    });
  }
  Ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                  const c10d::AllgatherOptions& opts) override {
    if (const auto inner = elsewhere(input, "all_gather"))
      return joined(inner->_allgather_base(output, input, opts));
    return gather_tensors(output, input, opts, OpType::_ALLGATHER_BASE);
  }
  Ptr<c10d::Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                  const c10d::AllgatherOptions& opts) override {
    if (const auto inner = elsewhere(inputs, "all_gather"))
      return joined(inner->allgather_into_tensor_coalesced(outputs, inputs, opts));
    return gather_tensors(outputs, inputs, opts, OpType::COALESCED);
  }

  Ptr<c10d::Work> gather(std::vector<Tensors>& outputs, Tensors& inputs,
                         const c10d::GatherOptions& opts) override {
    const at::Tensor& in = one(inputs, "gather");
    if (const auto inner = elsewhere(inputs, "gather")) return joined(inner->gather(outputs, inputs, opts));
    const int root = root_of(opts.rootRank);
    TORCH_CHECK(rank_ == root || outputs.empty(), "unisono: gather: give the outputs at the root alone.");
    const Tensors outs = rank_ == root ? one(outputs, ranks(), "gather") : Tensors();
    check_alike(outs, in, "gather");
    return begin(OpType::GATHER, "unisono:gather", opts, inputs, outs, [&](Steps& call) {
      if (rank_ == root) return gather_lists(call, in, outs, Collective::gather, root);
      const at::Tensor from = call.keep(packed(in));
      call.run(Collective::gather, bytes(from.const_data_ptr(), nullptr, in.nbytes(), root));
    });
  }
  Ptr<c10d::Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                          const c10d::ScatterOptions& opts) override {
    const at::Tensor& out = one(outputs, "scatter");
    if (const auto inner = elsewhere(outputs, "scatter"))
      return joined(inner->scatter(outputs, inputs, opts));
    const int root = root_of(opts.rootRank);
    TORCH_CHECK(rank_ == root || inputs.empty(), "unisono: scatter: give the inputs at the root alone.");
    const Tensors ins = rank_ == root ? one(inputs, ranks(), "scatter") : Tensors();
    check_alike(ins, out, "scatter");
    return begin(OpType::SCATTER, "unisono:scatter", opts, ins, outputs, [&](Steps& call) {
      const at::Tensor to = written(call, out);
      const auto place = -static_cast<std::ptrdiff_t>(out.nbytes()) * rank_;
      at::Tensor from;
      if (rank_ == root && consecutive(ins) && !disturbed(ins[0], to.nbytes() * ranks(), to, place)) {
        from = ins[0];  // a view of all would take 0.3 us
        for (const at::Tensor& in : ins) call.keep(in);
      } else if (rank_ == root) {
        from = call.keep(apart(flat_of(ins), to, place));
      }
      call.run(Collective::scatter,
               bytes(rank_ == root ? from.const_data_ptr() : nullptr, to.data_ptr(), out.nbytes(), root));
    });
  }

  Ptr<c10d::Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                 const c10d::ReduceScatterOptions& opts) override {
    const at::Tensor& out = one(outputs, "reduce_scatter");
    const Tensors& ins = one(inputs, ranks(), "reduce_scatter");
    if (const auto inner = elsewhere(outputs, "reduce_scatter", &opts.reduceOp))
      return joined(inner->reduce_scatter(outputs, inputs, opts));
    check_alike(out, ins[static_cast<std::size_t>(rank_)], 1, "reduce_scatter");
    for (const at::Tensor& in : ins)
      TORCH_CHECK(in.scalar_type() == out.scalar_type(),
                  "unisono: reduce_scatter: tensors must be of one type.");
    const Sum sum = *sum_of(out, opts.reduceOp);
    return begin(OpType::REDUCE_SCATTER, "unisono:reduce_scatter", opts, ins, outputs, [&](Steps& call) {
      const bool even =
          std::all_of(ins.begin(), ins.end(), [&](auto& in) { return in.numel() == ins[0].numel(); });
      if (even) return scatter_sums(call, out, flat_of(ins), sum);
      for (int r = 0; r < size_; ++r) reduce_to(call, ins[static_cast<std::size_t>(r)], out, sum, r);
    });
  }
  Ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                       const c10d::ReduceScatterOptions& opts) override {
    if (const auto inner = elsewhere(input, "reduce_scatter", &opts.reduceOp))
      return joined(inner->_reduce_scatter_base(output, input, opts));
    return scatter_tensors(output, input, opts, OpType::_REDUCE_SCATTER_BASE);
  }
  Ptr<c10d::Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                  const c10d::ReduceScatterOptions& opts) override {
    if (const auto inner = elsewhere(inputs, "reduce_scatter", &opts.reduceOp))
      return joined(inner->reduce_scatter_tensor_coalesced(outputs, inputs, opts));
    return scatter_tensors(outputs, inputs, opts, OpType::COALESCED);
  }

  Ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                std::vector<int64_t>& input_splits,
                                const c10d::AllToAllOptions& opts) override {
    if (const auto inner = elsewhere(input, "all_to_all"))
      return joined(inner->alltoall_base(output, input, output_splits, input_splits, opts));
    TORCH_CHECK(output.scalar_type() == input.scalar_type(),
                "unisono: all_to_all: tensors must be of one type.");
    // A rank may give equal splits where another gives none: both are all_to_all_v.
    const std::vector<std::size_t> sends = parts(input, input_splits),
                                   receives = parts(output, output_splits);
    return begin(OpType::ALLTOALL_BASE, "unisono:all_to_all", opts, input, {output}, [&](Steps& call) {
      const at::Tensor to = written(call, output);
      const at::Tensor from = call.keep(apart(input, to, kNowhere));
      call.run(bytes(from.const_data_ptr(), to.data_ptr(), 0), sends, receives);
    });
  }
  Ptr<c10d::Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    if (const auto inner = elsewhere(inputs, "all_to_all"))
      return joined(inner->alltoall(outputs, inputs, opts));
    TORCH_CHECK(outputs.size() == ranks() && inputs.size() == ranks(), "unisono: all_to_all needs lists of ",
                ranks(), " tensors.");
    return begin(OpType::ALLTOALL, "unisono:all_to_all", opts, inputs, outputs, [&](Steps& call) {
      std::vector<Message> messages;
      for (int r = 0; r < size_; ++r) {
        at::Tensor from = inputs[static_cast<std::size_t>(r)];
        for (const at::Tensor& out : outputs) from = apart(from, out, kNowhere);
        messages.push_back({from, r, true});
        messages.push_back({outputs[static_cast<std::size_t>(r)], r, false});
      }
      exchange(call, messages);
    });
  }

 private:
  int root_of(int64_t root) const {
    TORCH_CHECK(root >= 0 && root < size_, "unisono: root ", root, " is not a rank: there are ", size_,
                " ranks.");
    return static_cast<int>(root);
  }

  // Returns the bytes for each rank: of rows as `splits` counts them, else of equal parts.
  std::vector<std::size_t> parts(const at::Tensor& tensor, const std::vector<int64_t>& splits) const {
    c10d::checkSplitSizes(splits, tensor, size_);
    if (splits.empty()) return std::vector<std::size_t>(ranks(), tensor.nbytes() / ranks());
    const std::size_t rows = tensor.dim() ? static_cast<std::size_t>(tensor.size(0)) : 1;
    std::vector<std::size_t> all;
    for (const int64_t split : splits)
      all.push_back(rows ? tensor.nbytes() / rows * static_cast<std::size_t>(split) : 0);
    return all;
  }

  Ptr<c10d::Work> reduce_all(const Tensors& tensors, const c10d::AllreduceOptions& opts, OpType type) {
    return begin(type, "unisono:all_reduce", opts, tensors, tensors, [&](Steps& call) {
      for (const at::Tensor& tensor : tensors) {
        void* const data = written(call, tensor, true).data_ptr();
        call.run(Collective::all_reduce, sums(data, data, tensor, 1, *sum_of(tensor, opts.reduceOp)));
      }
    });
  }
  void reduce_to(Steps& call, const at::Tensor& in, const at::Tensor& out, const Sum& sum, int root) {
    if (rank_ != root) {
      const at::Tensor from = call.keep(packed(in));
      return call.run(Collective::reduce, sums(from.const_data_ptr(), nullptr, in, 1, sum, root));
    }
    const at::Tensor to = written(call, out, in.is_same(out));
    const at::Tensor from = call.keep(in.is_same(out) ? to : apart(in, to, 0));
    call.run(Collective::reduce, sums(from.const_data_ptr(), to.data_ptr(), in, 1, sum, root));
  }
  void gather_lists(Steps& call, const at::Tensor& in, const Tensors& outs,
                    Collective collective = Collective::all_gather, int root = 0) {
    const bool direct = consecutive(outs);
    const at::Tensor flat = direct ? outs[0] : flat_for(outs);
    const at::Tensor from = packed(in);
    void* to = flat.data_ptr();
    const auto* at = static_cast<const char*>(from.const_data_ptr());
    const bool inside =
        direct && at + in.nbytes() > to && at < static_cast<char*>(to) + in.nbytes() * ranks();
    const at::Tensor source = call.keep(inside ? copy_of(from) : from);
    call.run(collective, bytes(source.const_data_ptr(), to, in.nbytes(), root));
    if (!direct) call.after([flat, outs] { unpack(flat, outs); });
  }
  Ptr<c10d::Work> gather_tensors(at::TensorList outputs, at::TensorList inputs, const How& how, OpType type) {
    TORCH_CHECK(outputs.size() == inputs.size(), "unisono: all_gather needs as many outputs as inputs.");
    for (std::size_t i = 0; i < inputs.size(); ++i) check_alike(outputs[i], inputs[i], size_, "all_gather");
    return begin(type, "unisono:all_gather", how, inputs, outputs, [&](Steps& call) {
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        const at::Tensor to = written(call, outputs[i]);
        const at::Tensor from =
            call.keep(apart(inputs[i], to, static_cast<std::ptrdiff_t>(inputs[i].nbytes()) * rank_));
        call.run(Collective::all_gather, bytes(from.const_data_ptr(), to.data_ptr(), from.nbytes()));
      }
    });
  }
  void scatter_sums(Steps& call, const at::Tensor& output, const at::Tensor& input, const Sum& sum) {
    const at::Tensor to = written(call, output);
    const at::Tensor from =
        call.keep(apart(input, to, -static_cast<std::ptrdiff_t>(output.nbytes()) * rank_));
    call.run(Collective::reduce_scatter, sums(from.const_data_ptr(), to.data_ptr(), from, ranks(), sum));
  }
  Ptr<c10d::Work> scatter_tensors(at::TensorList outputs, at::TensorList inputs,
                                  const c10d::ReduceScatterOptions& opts, OpType type) {
    TORCH_CHECK(outputs.size() == inputs.size(), "unisono: reduce_scatter needs as many outputs as inputs.");
    for (std::size_t i = 0; i < inputs.size(); ++i)
      check_alike(inputs[i], outputs[i], size_, "reduce_scatter");
    return begin(type, "unisono:reduce_scatter", opts, inputs, outputs, [&](Steps& call) {
      for (std::size_t i = 0; i < inputs.size(); ++i)
        scatter_sums(call, outputs[i], inputs[i], *sum_of(inputs[i], opts.reduceOp));
    });
  }
};

Ptr<c10d::Backend> make_backend(const Ptr<c10d::Store>& store, int rank, int size, double timeout_s,
                                const std::string& group, const Ptr<c10d::Backend>& gloo,
                                std::unique_ptr<unisono::Communicator> made) {
  return c10::make_intrusive<Backend>(store, rank, size, timeout_s, group, gloo, std::move(made));
}

}  // namespace unisono_torch

PYBIND11_MODULE(_unisono_torch_distributed, module) {
  using namespace unisono_torch;
  // torch's split_group copies the options, and its new_group calls perform_nocolor_split on the ranks that
  // the new group lacks. Its own class of all backends has neither.
  py::class_<GroupOptions, Ptr<GroupOptions>, c10d::Backend::Options>(module, "Options")
      .def("__deepcopy__", [](const GroupOptions& self, const py::dict&) { return self.clone(); });
  py::class_<Backend, Ptr<Backend>, c10d::Backend>(module, "Backend")
      .def_property_readonly("options", &Backend::getBackendOptions)
      .def("perform_nocolor_split", [](const Backend&, const py::object&) {});
  module.def("make", [](const Ptr<c10d::Store>& store, int rank, int size, double timeout_s,
                        const std::string& group, const Ptr<c10d::Backend>& gloo) {
    const py::gil_scoped_release no_gil;
    return make_backend(store, rank, size, timeout_s, group, gloo);
  });
}
