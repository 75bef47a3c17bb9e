#include "routes.hpp"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdio>
#include <cstdlib>

namespace unisono_torch {
namespace {

using c10d::OpType;
using unisono::Collective;
using unisono::Communicator;

bool asked_to_log() {
  const char* asked = std::getenv("UNISONO_LOG");
  return asked && *asked && std::string(asked) != "0";
}

}  // namespace

Routes::Routes(const Ptr<c10d::Store>& store, int rank, int size, double timeout_s, std::string group,
               Ptr<c10d::Backend> gloo, std::unique_ptr<Communicator> made)
    : c10d::Backend(rank, size),
      store_(store),
      group_(std::move(group)),
      gloo_(std::move(gloo)),
      log_(asked_to_log()),
      options_(c10::make_intrusive<GroupOptions>(timeout_s)),
      communicator_(std::move(made)) {
  init();
  if (communicator_) communicator_->set_timeout(timeout_s);  // in place of the whole group's
  const auto bootstrap = std::make_shared<StoreBootstrap>(store, rank, size);
  Communicator::Options options;
  options.timeout_s = timeout_s;
  options.transport = []() -> std::shared_ptr<unisono::Transport> { throw SeveralNodes(); };
  try {
    if (!communicator_) communicator_ = std::make_unique<Communicator>(bootstrap, options);
    blocks_ = std::make_shared<Blocks>(*communicator_);
  } catch (const SeveralNodes&) {  // on every rank
  }
  gpus_ = std::make_unique<GpuGroup>(store, rank, size, timeout_s);
  say(communicator_ ? "shared memory carries it."
                    : "gloo carries it, since its ranks are on several machines.");
}

Routes::~Routes() {
  if (process_ == ::getpid()) {
    try {
      Routes::shutdown();
    } catch (const std::exception& error) { say(std::string("its end failed: ") + error.what()); }
    return;
  }
  static_cast<void>(communicator_.release());  // a forked child has neither its threads nor their locks
  static_cast<void>(gpus_.release());
  gloo_.release();
}

c10d::ErrorType Routes::getError() {
  try {
    if (communicator_) communicator_->raise_if_failed();
    gpus_->raise_if_failed();
  } catch (const unisono::TimeoutError&) {
    return c10d::ErrorType::TIMEOUT;
  } catch (const unisono::PeerLostError&) {
    return c10d::ErrorType::REMOTE_ERROR;
  } catch (const unisono::Error&) { return c10d::ErrorType::COMM_ERROR; }
  return c10d::ErrorType::SUCCESS;
}

void Routes::say(const std::string& what) const {
  if (log_ && rank_ == 0)
    std::fprintf(stderr, "unisono: group %s of %d ranks: %s\n", group_.c_str(), size_, what.c_str());
}

void Routes::say_once(const char* what, const char* carrier, const std::string& why) {
  if (!log_) return;
  const std::string text = c10::str(what, " goes to ", carrier, ": ", why, ".");
  const std::scoped_lock lock(said_mutex_);
  if (said_.insert(text).second) say(text);
}

Ptr<c10d::Backend> Routes::elsewhere(at::TensorList tensors, const char* what, const ReduceOp* op) {
  std::string why;
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.device() == tensors[0].device(), "unisono: ", what,
                ": tensors must be on one device, not ", tensors[0].device(), " and ", tensor.device(), ".");
    if (op ? !sum_of(tensor, *op) : !plain(tensor)) {
      const auto known = op ? op_of(*op) : std::nullopt;
      const bool of_some = known && (unisono::is_bitwise(*known) || op->op_ == ReduceOp::PREMUL_SUM);
      why = kind_of(tensor);
      if (op && (!known || of_some)) why += ", an operation that Unisono lacks";
    }
  }
  if (!tensors.empty() && tensors[0].is_cuda()) {
    if (why.empty() && gpus_->all(tensors[0].device())) return nullptr;
    return by_nccl(what, why.empty() ? gpus_->why() : why);
  }
  if (communicator_ && why.empty()) return nullptr;
  return by_gloo(what, why);
}

Ptr<c10d::Backend> Routes::by_gloo(const char* what, const std::string& why) {
  if (communicator_) say_once(what, "gloo", why);
  return gloo_;
}

Ptr<c10d::Backend> Routes::by_nccl(const char* what, const std::string& why) {
  say_once(what, "nccl", why);
  const Ptr<c10d::Backend> nccl = gpus_->nccl();
  if (batch_ && !batch_->nccl) {
    nccl->startCoalescing();
    batch_->nccl = nccl;
  }
  return nccl;
}

void Routes::setTimeout(std::chrono::milliseconds timeout) {
  TORCH_CHECK(timeout.count() > 0, "unisono: the timeout of a group is ", timeout.count(),
              " ms: it must be above 0.");
  options_->timeout = timeout;
  gloo_->setTimeout(timeout);
  if (communicator_) communicator_->set_timeout(1e-3 * static_cast<double>(timeout.count()));
  gpus_->set_timeout(timeout);
}

Ptr<c10d::Work> Routes::begin(OpType type, const char* title, How how, at::TensorList inputs,
                              at::TensorList outputs, Body body, std::shared_ptr<Gpu> gpu) {
  const at::TensorList some = inputs.empty() ? outputs : inputs;
  if (!gpu && !some.empty() && some[0].is_cuda()) gpu = gpus_->all(some[0].device());
  const uint64_t number = c10d::isP2POp(type) ? calls_made_.load() : ++calls_made_;
  if (gpu) {
    auto work =
        c10::make_intrusive<GpuWork>(gpu, rank_, type, title, inputs, outputs.vec(), number, how.async);
    work->start(body);
    return joined(work);
  }
  if (!how.async && !c10d::allow_inflight_collective_as_graph_input()) {
    RECORD_USER_SCOPE_WITH_INPUTS(title, std::vector<c10::IValue>(inputs.begin(), inputs.end()));
    by_torchs_errors([&] {
      Steps steps(*communicator_, how);
      body(steps);
      steps.finish();
    });
    return nullptr;
  }
  auto work =
      c10::make_intrusive<CallWork>(rank_, type, title, inputs, outputs.vec(), number, *communicator_, how);
  work->start(body);
  return joined(work);
}

// torch tells the backend the device of a barrier only by its ids, or by that of the group.
Ptr<c10d::Work> Routes::barrier(const c10d::BarrierOptions& opts) {
  std::optional<c10::Device> gpu = bound_device_id_;
  if (!opts.device_ids.empty() && at::hasCUDA())
    gpu = c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(opts.device_ids[0]));
  if (gpu && gpu->is_cuda()) return barrier_of_gpus(*gpu, opts);
  if (!communicator_) return joined(gloo_->barrier(opts));
  return begin(OpType::BARRIER, "unisono:barrier", opts, {}, {},
               [](Steps& call) { call.run(Collective::barrier, Call{}); });
}

Ptr<c10d::Work> Routes::barrier_of_gpus(c10::Device device, const c10d::BarrierOptions& opts) {
  const Tensors sign{at::zeros({1}, at::TensorOptions(device).dtype(at::kByte))};
  if (const auto inner = elsewhere(sign, "barrier")) return joined(inner->barrier(opts));
  return begin(OpType::BARRIER, "unisono:barrier", opts, sign, {}, [&](Steps& call) {
    void* const data = sign[0].data_ptr();
    call.run(Collective::all_reduce, sums(data, data, sign[0], 1, {DType::u8, unisono::Op::sum}));
  });
}

Ptr<c10d::Work> Routes::send(Tensors& tensors, int to, int tag) {
  const at::Tensor& tensor = one(tensors, "send");
  if (tensor.is_cuda()) return message({tensor, to, true}, tag);
  if (const auto inner = elsewhere(tensors, "send")) return joined(inner->send(tensors, to, tag));
  return begin(OpType::SEND, "unisono:send", How(), tensors, {}, [&](Steps& call) {
    const at::Tensor from = call.keep(packed(tensor));
    call.run(Collective::send, bytes(from.const_data_ptr(), nullptr, from.nbytes()), to, -1, tag);
  });
}
Ptr<c10d::Work> Routes::recv(Tensors& tensors, int from, int tag) {
  if (one(tensors, "recv").is_cuda()) return message({tensors[0], from, false}, tag);
  if (const auto inner = elsewhere(tensors, "recv")) return joined(inner->recv(tensors, from, tag));
  return receive(OpType::RECV, tensors, from, tag);
}
Ptr<c10d::Work> Routes::recvAnysource(Tensors& tensors, int tag) {
  TORCH_CHECK(!one(tensors, "recv").is_cuda(),
              "unisono: recv from any source is for tensors on CPUs: name the source.");
  if (const auto inner = elsewhere(tensors, "recv")) return joined(inner->recvAnysource(tensors, tag));
  return receive(OpType::RECVANYSOURCE, tensors, Communicator::kAnySource, tag);
}
Ptr<c10d::Work> Routes::receive(OpType type, const Tensors& tensors, int from, int tag) {
  return begin(type, "unisono:recv", How(), {}, tensors, [&](Steps& call) {
    const at::Tensor to = written(call, tensors[0]);
    call.run(Collective::recv, bytes(nullptr, to.data_ptr(), to.nbytes()), -1, from, tag);
  });
}

// Sends from a GPU, or receives there: with the batch, or with the peer alone.
Ptr<c10d::Work> Routes::message(const Message& one, int tag) {
  Tensors tensors{one.tensor};
  const c10::Device device = one.tensor.device();
  const auto gpu = batch_ ? gpus_->all(device) : gpus_->pair(device, one.peer);
  if (!gpu) {
    const auto nccl = by_nccl(one.sent ? "send" : "recv", gpus_->why());
    return one.sent ? nccl->send(tensors, one.peer, tag) : nccl->recv(tensors, one.peer, tag);
  }
  if (batch_) {
    batch_->messages.push_back(one);
    return batch_->works;
  }
  const Message to_peer{one.tensor, one.peer > rank_, one.sent};
  return begin(
      one.sent ? OpType::SEND : OpType::RECV, one.sent ? "unisono:send" : "unisono:recv", How(), {}, tensors,
      [&](Steps& call) { exchange(call, {to_peer}); }, gpu);
}

Ptr<c10d::Work> Routes::endCoalescing() {
  TORCH_CHECK(batch_, "unisono: endCoalescing comes after startCoalescing.");
  const auto batch = std::move(batch_);
  Tensors tensors;
  for (const Message& one : batch->messages) tensors.push_back(one.tensor);
  if (!tensors.empty())
    batch->works->add(begin(OpType::COALESCED, "unisono:batch_send_recv", How(), tensors, {},
                            [&](Steps& call) { exchange(call, batch->messages); }));
  if (batch->nccl) batch->works->add(batch->nccl->endCoalescing());
  return batch->works;
}

at::Tensor Routes::allocateTensor(long size, at::TensorOptions options) {
  TORCH_CHECK(communicator_ && options.device().is_cpu(), "unisono: this group has no symmetric memory on ",
              options.device(), ": ask supports_tensor_alloc before, and take torch.empty if it says no.");
  return by_torchs_errors([&] { return blocks_->make(size, options); });
}

// Keys of the store are those of this split: the store that torch gives may have keys of ranks before these.
Ptr<c10d::Backend> Routes::split(const Ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                 const Ptr<Options>& options) {
  if (last_split_.store == store) return last_split_.made.lock();
  const auto mine = std::find(ranks.begin(), ranks.end(), rank_);
  const bool member = mine != ranks.end();
  const int rank = static_cast<int>(mine - ranks.begin()), size = static_cast<int>(ranks.size());
  const int color = *std::min_element(ranks.begin(), ranks.end());
  std::optional<Communicator> made;
  if (communicator_) made = by_torchs_errors([&] { return communicator_->split(member ? color : -1, rank); });
  TORCH_CHECK(!made || made->size() == size, "unisono: a rank splits off ", size,
              " ranks, and another of them ", made->size(),
              ": give the same groups on every rank, and each rank in one at most.");
  last_split_ = {.number = last_split_.number + 1, .store = store};
  if (!member) return nullptr;
  const auto keys =
      c10::make_intrusive<c10d::PrefixStore>(c10::str("split/", last_split_.number, "/", color), store_);
  const double timeout_s = 1e-3 * static_cast<double>(options->timeout.count());
  const auto backend = make_backend(keys, rank, size, timeout_s, options->group_name,
                                    torchs_own("make_gloo", keys, rank, size, timeout_s),
                                    made ? std::make_unique<Communicator>(std::move(*made)) : nullptr);
  last_split_.made = c10::weak_intrusive_ptr<c10d::Backend>(backend);
  return backend;
}

void Routes::abort() {
  const char* const why = "torch.distributed has aborted the process group";
  gpus_->abort(why);
  if (communicator_) communicator_->abort(why);
  gloo_->abort();
}

void Routes::shutdown() {
  if (process_ != ::getpid()) return;
  gpus_->close();
  if (!communicator_) return;
  communicator_->close();
  blocks_->close();
  gloo_->shutdown();
}

}  // namespace unisono_torch
