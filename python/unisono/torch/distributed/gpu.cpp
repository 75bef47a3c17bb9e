#include "gpu.hpp"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

namespace unisono_torch {
namespace {

using unisono::Communicator;

constexpr int kEveryone = -1;
constexpr int kPairSms = 32;  // that a message may take beside a collective

void refuse_capture() {
  const py::gil_scoped_acquire gil;
  TORCH_CHECK(!py::module_::import("torch.cuda").attr("is_current_stream_capturing")().cast<bool>(),
              "unisono: the first call of a group on GPUs allocates, which a graph cannot capture: make the "
              "call once before.");
}

}  // namespace

void Gpu::enqueue(Body body, c10::Event* end) {
  const auto on = [&](const c10::Stream& stream) {
    Steps steps(communicator_, stream.native_handle());
    body(steps);
    steps.finish();
  };
  if (!end) return on(current());
  const std::scoped_lock lock(mutex_);
  fork_.record(current());
  fork_.block(beside_);
  const c10::StreamGuard guard(beside_);
  on(beside_);
  end->record(beside_);
}

void Gpu::close() noexcept {
  try {
    for (void* stream : {beside_.native_handle(), communicator_.last_stream()})
      communicator_.synchronize(stream);
  } catch (const std::exception&) {}  // the next call would have thrown it
  communicator_.close();
}

GpuWork::GpuWork(const std::shared_ptr<Gpu>& gpu, int rank, c10d::OpType type, const char* title,
                 at::TensorList inputs, Tensors outputs, uint64_t number, bool beside)
    : ProfiledWork(rank, type, title, inputs),
      gpu_(gpu),
      stream_(beside ? gpu->beside() : gpu->current()),
      outputs_(std::move(outputs)),
      number_(number),
      beside_(beside),
      end_(stream_.device_type()) {
  if (!beside) return;
  kept_ = outputs_;
  kept_.insert(kept_.end(), inputs.begin(), inputs.end());
}

// Tensors that nobody has waited for are freed when the stream has come so far.
GpuWork::~GpuWork() {
  const c10::impl::VirtualGuardImpl guard(stream_.device_type());
  for (const at::Tensor& tensor : kept_) guard.recordDataPtrOnStream(tensor.storage().data_ptr(), stream_);
}

void GpuWork::start(Body body) {
  by_torchs_errors([&] { gpu_.lock()->enqueue(body, beside_ ? &end_ : nullptr); });
  if (recordFunctionEndCallback_) std::exchange(recordFunctionEndCallback_, nullptr)();
}

void GpuWork::synchronize() {
  const c10::Stream current = c10::impl::VirtualGuardImpl(stream_.device_type()).getStream(stream_.device());
  const std::scoped_lock lock(mutex_);
  if (current != stream_) {
    end_.recordOnce(stream_);
    end_.block(current);
  }
  kept_.clear();
}

bool GpuWork::wait(std::chrono::milliseconds) {
  synchronize();
  const auto gpu = gpu_.lock();
  if (gpu && opType_ == c10d::OpType::BARRIER)
    by_torchs_errors([&] { gpu->communicator().synchronize(stream_.native_handle()); });
  else if (gpu && beside_) by_torchs_errors([&] { gpu->communicator().raise_if_failed(); });
  return true;
}

void GpuWork::note_failure() {
  const auto gpu = gpu_.lock();
  if (!gpu || exception_) return;
  try {
    gpu->communicator().raise_if_failed();
  } catch (...) { exception_ = as_torchs(std::current_exception()); }
}

bool GpuWork::isCompleted() {
  const std::scoped_lock lock(mutex_);
  note_failure();
  return exception_ || (end_.was_marked_for_recording() ? end_.query() : stream_.query());
}

Ptr<c10::ivalue::Future> GpuWork::getFuture() {
  const std::scoped_lock lock(mutex_);
  if (future_) return future_;
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                     std::vector<c10::Device>{stream_.device()});
  note_failure();
  const c10::StreamGuard guard(stream_);  // which those who wait for the Future wait for
  if (exception_) future_->setError(exception_);
  else future_->markCompleted(c10::IValue(outputs_));
  return future_;
}

bool Works::isCompleted() {
  return std::all_of(all_.begin(), all_.end(), [](const auto& one) { return one->isCompleted(); });
}
bool Works::isSuccess() const {
  return std::all_of(all_.begin(), all_.end(), [](const auto& one) { return one->isSuccess(); });
}
void Works::synchronize() {
  for (const auto& one : all_) one->synchronize();
}
bool Works::wait(std::chrono::milliseconds timeout) {
  for (const auto& one : all_) one->wait(timeout);
  return true;
}

std::shared_ptr<Gpu> GpuGroup::all(c10::Device device) { return find(device, kEveryone); }
std::shared_ptr<Gpu> GpuGroup::pair(c10::Device device, int peer) { return find(device, peer); }

// Python runs outside of the lock, for which a thread that has the GIL may wait.
std::shared_ptr<Gpu> GpuGroup::find(c10::Device device, int peer) {
  std::unique_lock lock(mutex_);
  auto found = made_.find(peer);
  if (found == made_.end()) {
    lock.unlock();
    refuse_capture();
    lock.lock();
    found = made_.find(peer);
    if (found == made_.end()) found = made_.emplace(peer, make(device, peer)).first;
  }
  const std::shared_ptr<Gpu>& gpu = found->second;
  TORCH_CHECK(!gpu || gpu->device() == device, "unisono: this group's GPU is ", gpu ? gpu->device() : device,
              ", and a tensor is on ", device, ": move it there, or make a group for each GPU.");
  return gpu;
}

std::shared_ptr<Gpu> GpuGroup::make(c10::Device device, int peer) {
  const bool pair = peer != kEveryone;
  const auto [low, high] = std::minmax(rank_, peer);
  const std::string prefix = pair ? c10::str("gpu/", low, "-", high) : "gpu";
  const auto bootstrap = std::make_shared<StoreBootstrap>(
      c10::make_intrusive<c10d::PrefixStore>(prefix, store_), pair ? rank_ > peer : rank_, pair ? 2 : size_);
  Communicator::Options options;
  options.timeout_s = timeout_s_;
  options.device = device.index();
  if (pair) options.max_sms = kPairSms;
  options.transport = []() -> std::shared_ptr<unisono::Transport> { throw SeveralNodes(); };
  std::shared_ptr<Gpu> gpu;
  by_torchs_errors([&] {
    try {
      gpu = std::make_shared<Gpu>(bootstrap, device, options);
    } catch (const SeveralNodes&) {  // on every rank
      why_ = "its ranks are on several machines";
    } catch (const unisono::ResourceError& error) {  // on every rank
      why_ = error.what();
    }
  });
  return gpu;
}

Ptr<c10d::Backend> GpuGroup::nccl() {
  {
    const std::scoped_lock lock(mutex_);
    if (nccl_) return nccl_;
  }
  const Ptr<c10d::Backend> made = torchs_own("make_nccl", store_, rank_, size_, timeout_s_);
  const std::scoped_lock lock(mutex_);
  if (!nccl_) nccl_ = made;
  return nccl_;
}

void GpuGroup::set_timeout(std::chrono::milliseconds timeout) {
  const std::scoped_lock lock(mutex_);
  timeout_s_ = 1e-3 * static_cast<double>(timeout.count());
  for (const auto& [peer, gpu] : made_)
    if (gpu) gpu->communicator().set_timeout(timeout_s_);
  if (nccl_) nccl_->setTimeout(timeout);
}

void GpuGroup::raise_if_failed() {
  const std::scoped_lock lock(mutex_);
  for (const auto& [peer, gpu] : made_)
    if (gpu) gpu->communicator().raise_if_failed();
}

void GpuGroup::abort(const std::string& why) {
  const std::scoped_lock lock(mutex_);
  for (const auto& [peer, gpu] : made_)
    if (gpu) gpu->communicator().abort(why);
  if (nccl_) nccl_->abort();
}

void GpuGroup::close() noexcept {
  const std::scoped_lock lock(mutex_);
  for (const auto& [peer, gpu] : made_)
    if (gpu) gpu->close();
  if (nccl_) nccl_->shutdown();
}

}  // namespace unisono_torch
