// The torch.distributed backend `unisono`: c10d's collectives by a Communicator, and by an inner gloo what it
// lacks. Every route is chosen from values that are equal on all ranks. Contiguity is not one: copies are
// local.
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdio>
#include <cstdlib>
#include <optional>

#include "tensors.hpp"

namespace unisono_torch {
namespace {

using c10d::OpType;
using unisono::Collective;
using unisono::Communicator;

// Thrown if the ranks are on several nodes.
struct SeveralNodes {};

}  // namespace

class Backend final : public c10d::Backend {
 public:
  Backend(const Ptr<c10d::Store>& store, int rank, int size, double timeout_s, std::string group,
          Ptr<c10d::Backend> gloo)
      : c10d::Backend(rank, size), group_(std::move(group)), gloo_(std::move(gloo)), log_(asked_to_log()) {
    init();
    options_ = c10::make_intrusive<Options>("unisono",
                                            std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1e3)));
    const auto bootstrap = std::make_shared<StoreBootstrap>(store, rank, size);
    Communicator::Options options;
    options.timeout_s = timeout_s;
    options.transport = []() -> std::shared_ptr<unisono::Transport> { throw SeveralNodes(); };
    try {
      communicator_ = std::make_unique<Communicator>(bootstrap, options);
    } catch (const SeveralNodes&) {  // on every rank
    }
    say(communicator_ ? "shared memory carries it."
                      : "gloo carries it, since its ranks are on several machines.");
  }

  ~Backend() override {
    if (process_ == ::getpid()) {
      try {
        shutdown();
      } catch (const std::exception& error) { say(std::string("its end failed: ") + error.what()); }
      return;
    }
    static_cast<void>(communicator_.release());  // a forked child has neither its threads nor their locks
    gloo_.release();
  }

  const std::string getBackendName() const override { return "unisono"; }
  Ptr<Options> getBackendOptions() override { return options_; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return calls_made_; }
  c10d::ErrorType getError() override {
    try {
      if (communicator_) communicator_->raise_if_failed();
    } catch (const unisono::TimeoutError&) {
      return c10d::ErrorType::TIMEOUT;
    } catch (const unisono::PeerLostError&) {
      return c10d::ErrorType::REMOTE_ERROR;
    } catch (const unisono::Error&) { return c10d::ErrorType::COMM_ERROR; }
    return c10d::ErrorType::SUCCESS;
  }

  Ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    one(tensors, "all_reduce");
    return reduce_all(tensors, opts, OpType::ALLREDUCE, "unisono:all_reduce",
                      [&] { return gloo_->allreduce(tensors, opts); });
  }
  Ptr<c10d::Work> allreduce_coalesced(Tensors& tensors,
                                      const c10d::AllreduceCoalescedOptions& opts) override {
    return reduce_all(tensors, opts, OpType::ALLREDUCE_COALESCED, "unisono:all_reduce",
                      [&] { return gloo_->allreduce_coalesced(tensors, opts); });
  }
  Ptr<c10d::Work> allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    to_gloo("all_reduce", "sparse tensors");
    return gloo_->allreduce_sparse(tensors, opts);
  }

  Ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    const at::Tensor& tensor = one(tensors, "broadcast");
    if (!here(tensors, "broadcast")) return gloo_->broadcast(tensors, opts);
    const int root = root_of(opts.rootRank);
    return begin(OpType::BROADCAST, "unisono:broadcast", opts.asyncOp, tensors, tensors, [&](CallWork& call) {
      const at::Tensor at = rank_ == root ? packed(tensor) : written(call, tensor);
      void* const data = call.keep(at).data_ptr();
      call.run(Collective::broadcast, bytes(data, data, tensor.nbytes(), root));
    });
  }

  Ptr<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    const at::Tensor& tensor = one(tensors, "reduce");
    if (!reduces_here(tensors, opts.reduceOp, "reduce")) return gloo_->reduce(tensors, opts);
    const int root = root_of(opts.rootRank);
    const Sum sum = *sum_of(tensor, opts.reduceOp);
    return begin(OpType::REDUCE, "unisono:reduce", opts.asyncOp, tensors, tensors,
                 [&](CallWork& call) { reduce_to(call, tensor, tensor, sum, root); });
  }

  Ptr<c10d::Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                            const c10d::AllgatherOptions& opts) override {
    const at::Tensor& in = one(inputs, "all_gather");
    const Tensors& outs = one(outputs, ranks(), "all_gather");
    if (!here(inputs, "all_gather")) return gloo_->allgather(outputs, inputs, opts);
    check_alike(outs, in, "all_gather");
    return begin(OpType::ALLGATHER, "unisono:all_gather", opts.asyncOp, inputs, outs,
                 [&](CallWork& call) { gather_lists(call, in, outs); });
  }
  Ptr<c10d::Work> allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                      const c10d::AllgatherOptions& opts) override {
    if (!here(inputs, "all_gather")) return gloo_->allgather_coalesced(outputs, inputs, opts);
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
    return begin(OpType::ALLGATHER_COALESCED, "unisono:all_gather", opts.asyncOp, inputs, all,
                 [&](CallWork& call) {
                   for (std::size_t i = 0; i < inputs.size(); ++i)
                     gather_lists(call, inputs[i], of_inputs[i]);
                 });
  }
  Ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                  const c10d::AllgatherOptions& opts) override {
    Tensors outputs{output}, inputs{input};
    if (!here(inputs, "all_gather")) return gloo_->_allgather_base(output, input, opts);
    return gather_tensors(outputs, inputs, opts.asyncOp, OpType::_ALLGATHER_BASE);
  }
  Ptr<c10d::Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                  const c10d::AllgatherOptions& opts) override {
    if (!here(inputs, "all_gather")) return gloo_->allgather_into_tensor_coalesced(outputs, inputs, opts);
    return gather_tensors(outputs, inputs, opts.asyncOp, OpType::COALESCED);
  }

  Ptr<c10d::Work> gather(std::vector<Tensors>& outputs, Tensors& inputs,
                         const c10d::GatherOptions& opts) override {
    const at::Tensor& in = one(inputs, "gather");
    if (!here(inputs, "gather")) return gloo_->gather(outputs, inputs, opts);
    const int root = root_of(opts.rootRank);
    TORCH_CHECK(rank_ == root || outputs.empty(), "unisono: gather: give the outputs at the root alone.");
    const Tensors outs = rank_ == root ? one(outputs, ranks(), "gather") : Tensors();
    check_alike(outs, in, "gather");
    return begin(OpType::GATHER, "unisono:gather", opts.asyncOp, inputs, outs, [&](CallWork& call) {
      const at::Tensor from = call.keep(packed(in));
      const at::Tensor flat = rank_ == root ? flat_for(outs) : at::Tensor();
      call.run(Collective::gather,
               bytes(from.const_data_ptr(), rank_ == root ? flat.data_ptr() : nullptr, in.nbytes(), root));
      if (rank_ == root) call.after([flat, outs] { unpack(flat, outs); });
    });
  }
  Ptr<c10d::Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                          const c10d::ScatterOptions& opts) override {
    const at::Tensor& out = one(outputs, "scatter");
    if (!here(outputs, "scatter")) return gloo_->scatter(outputs, inputs, opts);
    const int root = root_of(opts.rootRank);
    TORCH_CHECK(rank_ == root || inputs.empty(), "unisono: scatter: give the inputs at the root alone.");
    const Tensors ins = rank_ == root ? one(inputs, ranks(), "scatter") : Tensors();
    check_alike(ins, out, "scatter");
    return begin(OpType::SCATTER, "unisono:scatter", opts.asyncOp, ins, outputs, [&](CallWork& call) {
      const at::Tensor to = written(call, out);
      const at::Tensor flat = rank_ == root ? call.keep(flat_of(ins)) : at::Tensor();
      call.run(Collective::scatter,
               bytes(rank_ == root ? flat.const_data_ptr() : nullptr, to.data_ptr(), out.nbytes(), root));
    });
  }

  Ptr<c10d::Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                 const c10d::ReduceScatterOptions& opts) override {
    const at::Tensor& out = one(outputs, "reduce_scatter");
    const Tensors& ins = one(inputs, ranks(), "reduce_scatter");
    if (!reduces_here(outputs, opts.reduceOp, "reduce_scatter"))
      return gloo_->reduce_scatter(outputs, inputs, opts);
    check_alike(out, ins[static_cast<std::size_t>(rank_)], 1, "reduce_scatter");
    for (const at::Tensor& in : ins)
      TORCH_CHECK(in.scalar_type() == out.scalar_type(),
                  "unisono: reduce_scatter: tensors must be of one type.");
    const Sum sum = *sum_of(out, opts.reduceOp);
    return begin(
        OpType::REDUCE_SCATTER, "unisono:reduce_scatter", opts.asyncOp, ins, outputs, [&](CallWork& call) {
          const bool even =
              std::all_of(ins.begin(), ins.end(), [&](auto& in) { return in.numel() == ins[0].numel(); });
          if (even) return scatter_sums(call, out, flat_of(ins), sum);
          for (int r = 0; r < size_; ++r) reduce_to(call, ins[static_cast<std::size_t>(r)], out, sum, r);
        });
  }
  Ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                       const c10d::ReduceScatterOptions& opts) override {
    const Tensors outputs{output}, inputs{input};
    if (!reduces_here(inputs, opts.reduceOp, "reduce_scatter"))
      return gloo_->_reduce_scatter_base(output, input, opts);
    return scatter_tensors(outputs, inputs, opts, OpType::_REDUCE_SCATTER_BASE);
  }
  Ptr<c10d::Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                  const c10d::ReduceScatterOptions& opts) override {
    if (!reduces_here(inputs, opts.reduceOp, "reduce_scatter"))
      return gloo_->reduce_scatter_tensor_coalesced(outputs, inputs, opts);
    return scatter_tensors(outputs, inputs, opts, OpType::REDUCE_SCATTER_TENSOR_COALESCED);
  }

  Ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                std::vector<int64_t>& input_splits,
                                const c10d::AllToAllOptions& opts) override {
    if (!here({input}, "all_to_all"))
      return gloo_->alltoall_base(output, input, output_splits, input_splits, opts);
    TORCH_CHECK(output.scalar_type() == input.scalar_type(),
                "unisono: all_to_all: tensors must be of one type.");
    // A rank may give equal splits where another gives none: both are all_to_all_v.
    const std::vector<std::size_t> sends = parts(input, input_splits),
                                   receives = parts(output, output_splits);
    return begin(OpType::ALLTOALL_BASE, "unisono:all_to_all", opts.asyncOp, Tensors{input}, {output},
                 [&](CallWork& call) {
                   const at::Tensor to = written(call, output);
                   const at::Tensor from = call.keep(apart(input, to, kNowhere));
                   call.run(bytes(from.const_data_ptr(), to.data_ptr(), 0), sends, receives);
                 });
  }
  Ptr<c10d::Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    if (!here(inputs, "all_to_all")) return gloo_->alltoall(outputs, inputs, opts);
    TORCH_CHECK(outputs.size() == ranks() && inputs.size() == ranks(), "unisono: all_to_all needs lists of ",
                ranks(), " tensors.");
    return begin(OpType::ALLTOALL, "unisono:all_to_all", opts.asyncOp, inputs, outputs, [&](CallWork& call) {
      Tensors from, to;
      std::vector<unisono::Outgoing> sends;
      std::vector<unisono::Incoming> receives;
      static char empty = 0;  // a place for messages of no bytes
      for (int r = 0; r < size_; ++r) {
        const auto i = static_cast<std::size_t>(r);
        from.push_back(packed(inputs[i]));
        for (const at::Tensor& out : outputs) from.back() = apart(from.back(), out, kNowhere);
        to.push_back(written(call, outputs[i]));
        const void* in = call.keep(from.back()).const_data_ptr();
        sends.push_back({in ? in : &empty, from.back().nbytes(), r});
        receives.push_back({to.back().numel() ? to.back().data_ptr() : &empty, to.back().nbytes(), r});
      }
      call.run(Call{.dtype = DType::u8}, sends, receives);
    });
  }

  Ptr<c10d::Work> barrier(const c10d::BarrierOptions& opts) override {
    if (!communicator_) return gloo_->barrier(opts);
    return begin(OpType::BARRIER, "unisono:barrier", opts.asyncOp, std::nullopt, {},
                 [](CallWork& call) { call.run(Collective::barrier); });
  }
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all) override {
    gloo_->monitoredBarrier(opts, wait_all);
  }

  Ptr<c10d::Work> send(Tensors& tensors, int to, int tag) override {
    to_gloo("send", "tags");
    return gloo_->send(tensors, to, tag);
  }
  Ptr<c10d::Work> recv(Tensors& tensors, int from, int tag) override {
    to_gloo("recv", "tags");
    return gloo_->recv(tensors, from, tag);
  }
  Ptr<c10d::Work> recvAnysource(Tensors& tensors, int tag) override {
    to_gloo("recv", "any source");
    return gloo_->recvAnysource(tensors, tag);
  }

  void abort() override {
    if (communicator_) communicator_->abort("torch.distributed has aborted the process group");
    gloo_->abort();
  }
  void shutdown() override {
    if (!communicator_ || process_ != ::getpid()) return;
    communicator_->close();
    gloo_->shutdown();
  }

 private:
  static bool asked_to_log() {
    const char* asked = std::getenv("UNISONO_LOG");
    return asked && *asked && std::string(asked) != "0";
  }

  std::size_t ranks() const { return static_cast<std::size_t>(size_); }

  void say(const std::string& what) const {
    if (log_ && rank_ == 0)
      std::fprintf(stderr, "unisono: group %s of %d ranks: %s\n", group_.c_str(), size_, what.c_str());
  }
  // Says once why calls go to gloo.
  void to_gloo(const char* what, const std::string& why) {
    if (!log_ || !communicator_) return;
    const std::string text = std::string(what) + " goes to gloo: " + why + ".";
    const std::scoped_lock lock(said_mutex_);
    if (said_.insert(text).second) say(text);
  }

  // Returns whether the communicator moves these tensors.
  bool here(const Tensors& tensors, const char* what) {
    if (!communicator_) return false;
    for (const at::Tensor& tensor : tensors)
      if (!plain(tensor)) return to_gloo(what, kind_of(tensor)), false;
    return true;
  }
  bool reduces_here(const Tensors& tensors, const ReduceOp& op, const char* what) {
    if (!communicator_) return false;
    for (const at::Tensor& tensor : tensors)
      if (!sum_of(tensor, op))
        return to_gloo(what, kind_of(tensor) + (op_of(op) ? "" : ", an operation of gloo's")), false;
    return true;
  }

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

  template <class Body>
  Ptr<c10d::Work> begin(OpType type, const char* title, bool async, const std::optional<Tensors>& inputs,
                        Tensors outputs, const Body& body) {
    auto work = c10::make_intrusive<CallWork>(rank_, type, title, inputs, std::move(outputs), ++calls_made_,
                                              *communicator_, async);
    work->start(body);
    return work;
  }

  template <class Opts, class Gloo>
  Ptr<c10d::Work> reduce_all(const Tensors& tensors, const Opts& opts, OpType type, const char* title,
                             Gloo&& gloo) {
    if (!reduces_here(tensors, opts.reduceOp, "all_reduce")) return gloo();
    return begin(type, title, opts.asyncOp, tensors, tensors, [&](CallWork& call) {
      for (const at::Tensor& tensor : tensors) {
        void* const data = written(call, tensor, true).data_ptr();
        call.run(Collective::all_reduce, sums(data, data, tensor, 1, *sum_of(tensor, opts.reduceOp)));
      }
    });
  }
  void reduce_to(CallWork& call, const at::Tensor& in, const at::Tensor& out, const Sum& sum, int root) {
    if (rank_ != root) {
      const at::Tensor from = call.keep(packed(in));
      return call.run(Collective::reduce, sums(from.const_data_ptr(), nullptr, in, 1, sum, root));
    }
    const at::Tensor to = written(call, out, in.is_same(out));
    const at::Tensor from = call.keep(in.is_same(out) ? to : apart(in, to, 0));
    call.run(Collective::reduce, sums(from.const_data_ptr(), to.data_ptr(), in, 1, sum, root));
  }
  void gather_lists(CallWork& call, const at::Tensor& in, const Tensors& outs) {
    const bool direct = consecutive(outs);
    const at::Tensor flat = direct ? outs[0] : flat_for(outs);
    const at::Tensor from = packed(in);
    void* to = flat.data_ptr();
    const auto* at = static_cast<const char*>(from.const_data_ptr());
    const bool inside =
        direct && at + in.nbytes() > to && at < static_cast<char*>(to) + in.nbytes() * ranks();
    const at::Tensor source = call.keep(inside ? from.clone() : from);
    call.run(Collective::all_gather, bytes(source.const_data_ptr(), to, in.nbytes()));
    if (!direct) call.after([flat, outs] { unpack(flat, outs); });
  }
  Ptr<c10d::Work> gather_tensors(const Tensors& outputs, const Tensors& inputs, bool async, OpType type) {
    TORCH_CHECK(outputs.size() == inputs.size(), "unisono: all_gather needs as many outputs as inputs.");
    for (std::size_t i = 0; i < inputs.size(); ++i) check_alike(outputs[i], inputs[i], size_, "all_gather");
    return begin(type, "unisono:all_gather", async, inputs, outputs, [&](CallWork& call) {
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        const at::Tensor to = written(call, outputs[i]);
        const at::Tensor from =
            call.keep(apart(inputs[i], to, static_cast<std::ptrdiff_t>(inputs[i].nbytes()) * rank_));
        call.run(Collective::all_gather, bytes(from.const_data_ptr(), to.data_ptr(), from.nbytes()));
      }
    });
  }
  void scatter_sums(CallWork& call, const at::Tensor& output, const at::Tensor& input, const Sum& sum) {
    const at::Tensor to = written(call, output);
    const at::Tensor from =
        call.keep(apart(input, to, -static_cast<std::ptrdiff_t>(output.nbytes()) * rank_));
    call.run(Collective::reduce_scatter, sums(from.const_data_ptr(), to.data_ptr(), from, ranks(), sum));
  }
  Ptr<c10d::Work> scatter_tensors(const Tensors& outputs, const Tensors& inputs,
                                  const c10d::ReduceScatterOptions& opts, OpType type) {
    TORCH_CHECK(outputs.size() == inputs.size(), "unisono: reduce_scatter needs as many outputs as inputs.");
    for (std::size_t i = 0; i < inputs.size(); ++i)
      check_alike(inputs[i], outputs[i], size_, "reduce_scatter");
    return begin(type, "unisono:reduce_scatter", opts.asyncOp, inputs, outputs, [&](CallWork& call) {
      for (std::size_t i = 0; i < inputs.size(); ++i)
        scatter_sums(call, outputs[i], inputs[i], *sum_of(inputs[i], opts.reduceOp));
    });
  }

  const pid_t process_ = ::getpid();
  const std::string group_;
  Ptr<c10d::Backend> gloo_;
  const bool log_;
  Ptr<Options> options_;
  std::unique_ptr<Communicator> communicator_;  // none: gloo carries everything
  std::atomic<uint64_t> calls_made_ = 0;
  std::mutex said_mutex_;
  std::set<std::string> said_;
};

}  // namespace unisono_torch

PYBIND11_MODULE(_unisono_torch_distributed, module) {
  using namespace unisono_torch;
  module.def("make",
             [](const Ptr<c10d::Store>& store, int rank, int size, double timeout_s, const std::string& group,
                const Ptr<c10d::Backend>& gloo) -> Ptr<c10d::Backend> {
               const py::gil_scoped_release no_gil;
               return c10::make_intrusive<Backend>(store, rank, size, timeout_s, group, gloo);
             });
}
