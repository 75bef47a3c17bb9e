#include "fabric/communicator.hpp"

#include <algorithm>
#include <chrono>
#include <thread>
#include <tuple>

#include "base/env.hpp"
#include "core/allocation.hpp"
#include "core/comparison.hpp"
#include "core/dispatch.hpp"
#include "cuda/nic.hpp"
#include "fabric/fabric_group.hpp"
#include "fabric/library.hpp"
#include "fabric/settings.hpp"
#include "host/move.hpp"
#include "host/segment.hpp"
#include "programs/send_recv.hpp"

namespace unisono {
namespace {

// A rank's part of an allocation, as its peers need it.
struct Offer {
  std::uint64_t address = 0, bytes = 0;
  std::uint32_t number = 0;  // of its region
  std::uint64_t keys[fabric::kMostChannels] = {};
};

class FabricCommunicator final : public Communicator::Impl {
 public:
  FabricCommunicator(Bootstrap& bootstrap, const Communicator::Options& options,
                     const Communicator::Fabric& settings)
      : Impl(options.check.value_or(env().check)),
        pinned_(settings.pinned),
        device_(options.device),
        gpu_(pinned_ || device_ ? cuda::NicGpu::make(device_) : nullptr),
        group_(bootstrap, {.check = check_,
                           .lane = fabric::settings_of(settings, bootstrap.size(), options.device.has_value(),
                                                       timeout_of(options)),
                           .while_waiting = options.while_waiting}),
        plan_(Plan::of_fabric()),
        gpu_plan_(Plan::of_fabric_gpu()) {}

  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  bool closed() const override { return group_.left(); }
  void close() noexcept override { group_.leave(); }
  void fail(const Failure& failure) noexcept override { group_.record(failure.kind, failure.text); }
  void raise_if_failed() override { group_.look_for_failure(); }
  std::optional<int> device() const override { return device_; }
  // Waits for the caller's own work: a call on GPU memory is complete when it returns.
  void synchronize(void* stream) override {
    if (!device_) return Impl::synchronize(stream);
    while (!gpu_->idle(stream)) {
      group_.let_caller_in();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

 private:
  Plan& plan(Memory memory) override { return memory == Memory::host ? plan_ : gpu_plan_; }

  void set_timeout(std::optional<double> timeout_s) override { group_.set_timeout(timeout_s); }
  void do_run(Request& request) override {
    Args& args = request.args;
    const Algorithm algorithm = chosen(request);
    const bool on_gpu = request.call->memory == Memory::device;
    const auto current = on_gpu ? gpu_->current() : nullptr;
    if (on_gpu) finish_stream(request);  // neither this rank's NIC nor a peer's waits for it
    // in all_to_all_v each rank plans by its own parts, which go the same way by any algorithm
    if (!is_direct(algorithm) && !traits_of(request.collective).by_parts()) request.algorithm = algorithm;
    if (is_direct(algorithm) && request.bytes() > 0) meet_places(request);
    else if (check_ && size() > 1) compare_calls(request);
    if (args.bytes == 0) return group_.lane().finish();
    if (on_gpu) return run_on_gpu(request);
    if (size() == 1) return host::copy(args.out, args.in, args.bytes);
    group_.lane().prepare(
        host::kernels().reduce[static_cast<int>(request.call->dtype)][static_cast<int>(request.call->op)],
        sources_stay(request));
    const Collective collective = request.collective;
    if (args.outputs) run_stores(group_.lane(), collective, Algorithm::direct, args);
    else if (is_direct(algorithm))  // planned, but a rank's buffer is not symmetric
      run_push(RingChannel(group_.lane()), collective, Plan::staged(collective), args);
    else run_push(RingChannel(group_.lane()), collective, algorithm, args);
    group_.lane().finish();
  }

  void do_run_pair(Request& request, int to, int from) override {
    chosen(request);
    if (check_) compare_pair(*this, RingChannel(group_.lane()), request, to, from);
    Args& args = request.args;
    if (args.bytes == 0) return group_.lane().finish();
    if (to == rank() && from == rank()) return host::copy(args.out, args.in, args.bytes);
    group_.lane().prepare(nullptr, sources_stay(request));
    RingChannel channel(group_.lane());
    send_recv_push(channel, to, to < 0 ? 0 : args.bytes, from, from < 0 ? 0 : args.bytes, args);
    group_.lane().finish();
  }

  void do_barrier() override {
    if (size() == 1) return;
    if (check_) compare(*this, group_.exchange(Ticket::of(Collective::barrier)));
    meet(group_.lane());
    group_.lane().finish();
  }

  std::shared_ptr<void> do_allocate(std::size_t bytes, Memory memory) override {
    if (check_ && size() > 1) compare(*this, group_.exchange(Ticket::of(Collective::empty, bytes)));
    if (memory == Memory::device && !device_) refuse_gpu();
    FabricEndpoint& lane = group_.lane();
    lane.forget_released();
    auto region = std::make_shared<fabric::Region>();
    AllocationAgreement agreement(group_, bytes, "symmetric memory");
    agreement.attempt([&] {
      region->bytes = std::max<std::size_t>(bytes, 1);
      if (memory == Memory::device) region->memory = gpu_->memory(region->bytes);
      else {
        check_room(bytes, group_.ranks_here());
        region->memory = pinned_ ? gpu_->pinned(region->bytes) : fabric::host_memory(region->bytes);
      }
    });
    share(agreement, region, memory);
    // the lane holds the memory too, until the next allocation
    return {region->memory.get(),
            [memory = region->memory, released = region->released](void*) { released->store(true); }};
  }

  std::shared_ptr<void> do_register(const MemoryRange& range) override {
    if (check_ && size() > 1) compare(*this, group_.exchange(Ticket::of(Collective::register_memory)));
    auto* const begin = static_cast<byte*>(range.data);
    FabricEndpoint& lane = group_.lane();
    lane.forget_released();
    auto region = std::make_shared<fabric::Region>();
    auto agreement = agree_to_register(group_, range);
    agreement.attempt([&] {
      if (range.bytes > 0 && lane.find(begin, 1).first) throw UsageError(kSymmetricAlready);
      region->bytes = range.bytes;
      region->memory = {std::const_pointer_cast<void>(range.owner), begin};
    });
    if (range.bytes == 0) return std::const_pointer_cast<void>(range.owner);
    share(agreement, region, range.memory);
    return {region->released.get(), [released = region->released](void*) { released->store(true); }};
  }

  void do_end(Registration::State& one) override {
    if (size() > 1) compare(*this, group_.exchange(Ticket::of(Collective::end_registration, one.number)));
    one.kept.reset();
    group_.lane().forget_released();
  }

  // Registers this rank's region with its NICs, and tells and learns keys.
  void share(AllocationAgreement<FabricGroup>& agreement, const std::shared_ptr<fabric::Region>& region,
             Memory memory) {
    FabricEndpoint& lane = group_.lane();
    Offer mine;
    agreement.attempt([&] {
      if (memory == Memory::device) {
        region->device = device_;
        lane.enroll(*region, gpu_->dmabuf(region->memory.get(), region->bytes));
      } else lane.enroll(*region);
      mine.number = lane.free_number();
      const fabric::Announcement own = region->announcement();
      mine.address = own.address;
      mine.bytes = own.bytes;
      std::copy(own.keys.begin(), own.keys.end(), mine.keys);
    });
    const auto offers = agreement.meet(mine);
    lane.add_region(region);
    for (int r = 0; r < size(); ++r) {
      const Offer& its = offers[static_cast<std::size_t>(r)];
      const fabric::Announcement one{its.address, its.bytes, {its.keys, its.keys + lane.channels()}};
      if (!one.possible(region->bytes) || !lane.learn_region(r, its.number, one))
        disagree("rank " + std::to_string(r) +
                 " announced symmetric memory at a place, or of a length, that cannot be.");
    }
    any_symmetric_ = true;
  }

  void leave() noexcept override { group_.leave(); }
  void enter(std::string_view what, std::uint64_t call) override { group_.enter(what, call); }
  void ended() noexcept override { group_.ended(); }
  void disagree(const std::string& text) override { group_.fail(FailureKind::mismatch, text); }

  // Returns the algorithm, the same on every rank. The ranks must still agree on direct, by their buffers.
  Algorithm chosen(const Request& request) const {
    const bool on_gpu = request.call->memory == Memory::device;
    if (on_gpu && !device_) refuse_gpu();
    if (on_gpu && request.collective != Collective::all_to_all)
      throw UsageError("the fabric lane has no " + std::string(name_of(request.collective)) +
                       " of GPU memory: pass host memory, or use the CUDA lane within a machine.");
    const Algorithm asked = request.algorithm;
    if (on_gpu && asked != Algorithm::automatic && !is_direct(asked))
      throw UsageError("the fabric lane has no " + std::string(name_of(asked)) +
                       " of GPU memory, only direct: leave algorithm out.");
    if (request.call->wire != Wire::exact)
      throw UsageError("the fabric lane sends elements as they are: leave wire out.");
    if (is_packets(asked) || is_lines(asked) || (is_direct(asked) && !stores_only(request.collective)))
      throw UsageError("the fabric lane has no " + std::string(name_of(asked)) + " for " +
                       std::string(name_of(request.collective)) + ": leave algorithm out, or name " +
                       std::string(name_of(Plan::staged(request.collective))) + ".");
    if (on_gpu) return Algorithm::direct;
    if (asked != Algorithm::automatic) return asked;
    if (size() == 1) return Plan::staged(request.collective);
    const bool symmetric = any_symmetric_ && stores_only(request.collective);
    const Algorithm planned = plan_.choose(request.collective, request.bytes(), symmetric);
    return is_direct(planned) && !symmetric ? Plan::staged(request.collective) : planned;
  }

  // Returns whether the input stays as it is until the call ends: no arriving data takes its place.
  static bool sources_stay(const Request& request) {
    const CollectiveTraits& traits = traits_of(request.collective);
    const Args& a = request.args;
    return !(traits.combines || traits.swaps || traits.two_ended) || a.in + request.in_bytes <= a.out ||
           a.out + request.out_bytes <= a.in;
  }

  Ticket ticket_of(const Request& request) const {
    Ticket mine = Ticket::of(request);
    mine.in_place = request.in_place();
    return mine;
  }
  void compare_calls(const Request& request) {
    if (traits_of(request.collective).by_parts()) compare_parts(*this, RingChannel(group_.lane()), request);
    else compare(*this, group_.exchange(ticket_of(request)));
  }

  // Exchanges the buffers' places. Fills in the outputs' addresses if all those written to are symmetric.
  void meet_places(Request& request) {
    Ticket mine = ticket_of(request);
    FabricEndpoint& lane = group_.lane();
    const bool writes_out = request.out_bytes > 0;
    if (writes_out)
      std::tie(mine.out.allocation, mine.out.offset) = lane.find(request.args.out, request.out_bytes);
    std::tie(mine.in.allocation, mine.in.offset) = lane.find(request.args.in, request.in_bytes);
    const auto tickets = group_.exchange(mine);
    compare(*this, tickets);
    const bool to_root = request.collective == Collective::gather;
    const bool on_gpu = request.call->memory == Memory::device;
    const bool all_registered = lane.needs_local_registration() || on_gpu;
    bool direct = true;
    for (int r = 0; r < size(); ++r) {
      const Ticket& its = tickets[static_cast<std::size_t>(r)];
      const bool receives = !to_root || r == request.args.root;
      direct = direct && (!receives || its.out.allocation != unisono::Place::kNone) &&
               (!all_registered || its.in.allocation != unisono::Place::kNone) &&
               !(traits_of(request.collective).swaps && its.in_place);
    }
    if (!direct) {
      if (on_gpu)
        throw UsageError(
            "an all_to_all of GPU memory over the fabric needs registered buffers, or buffers from "
            "Communicator::empty, on every rank, out of place: use them, or host memory.");
      if (is_direct(request.algorithm))
        throw UsageError(
            "direct needs registered buffers, or buffers from Communicator::empty, on every rank, out of "
            "place in an all_to_all: use them, or another algorithm.");
      return;
    }
    outputs_.assign(tickets.size(), nullptr);
    inputs_.assign(tickets.size(), nullptr);
    for (int r = 0; r < size(); ++r) {
      const unisono::Place& its = tickets[static_cast<std::size_t>(r)].out;
      if (to_root && r != request.args.root) continue;
      byte* const at = lane.reach(r, its.allocation, its.offset, request.args.bytes);
      if (!at) disagree("rank " + std::to_string(r) + " announced a buffer outside its symmetric memory.");
      outputs_[static_cast<std::size_t>(r)] = r == rank() ? request.args.out : at;
    }
    request.args.outputs = outputs_.data();
    request.args.inputs = inputs_.data();
  }

  void finish_stream(const Request& request) {
    group_.lane().await(rank(), [&] { return gpu_->idle(request.call->stream); });
  }

  // Returns when the call is complete. The rank's own block is copied while the others travel.
  void run_on_gpu(const Request& request) {
    Args args = request.args;
    const std::size_t own = args.block * static_cast<std::size_t>(rank());
    try {
      gpu_->copy(args.in + own, args.out + own, args.block, request.call->stream);
    } catch (const ResourceError& error) { group_.fail(FailureKind::resource, error.what()); }
    parts_.clear();
    for (int p = 0; p < size(); ++p) {
      parts_.push_back({const_cast<byte*>(args.in) + args.block * static_cast<std::size_t>(p),
                        p == rank() ? 0 : args.block});
      outputs_[static_cast<std::size_t>(p)] += own;
    }
    args.sends = parts_.data();
    group_.lane().prepare(nullptr, true);
    all_to_all_direct(group_.lane(), args);
    group_.lane().finish();
    finish_stream(request);
    gpu_->take_in();
  }

  bool pinned_;  // the host memory of `allocate`
  std::optional<int> device_;
  std::unique_ptr<cuda::NicGpu> gpu_;  // null: neither GPU memory nor pinned memory is asked for
  FabricGroup group_;
  Plan plan_, gpu_plan_;
  bool any_symmetric_ = false;
  std::vector<const byte*> inputs_;
  std::vector<byte*> outputs_;
  std::vector<Args::Part> parts_;
};

}  // namespace

std::unique_ptr<Communicator::Impl> fabric::make_communicator(Bootstrap& bootstrap,
                                                              const Communicator::Options& options) {
  return std::make_unique<FabricCommunicator>(bootstrap, options,
                                              options.fabric.value_or(Communicator::Fabric{}));
}

namespace {

FabricProvider described(const fabric::Provider& one, const std::vector<fabric::Provider>& with_device) {
  return {.name = one.name,
          .nics = static_cast<int>(one.nics.size()),
          .most_channels = one.most_channels,
          .line_gbps = one.line_gbps,
          .device_memory = std::any_of(with_device.begin(), with_device.end(),
                                       [&](const auto& other) { return other.name == one.name; })};
}

}  // namespace

std::vector<FabricProvider> fabric_providers() {
  std::vector<FabricProvider> found;
  const auto with_device = fabric::providers(true);
  for (const fabric::Provider& one : fabric::providers()) found.push_back(described(one, with_device));
  return found;
}

FabricProvider fabric_provider(const std::string& name) {
  return described(fabric::provider_named(name.empty() ? env().fabric_provider : name),
                   fabric::providers(true));
}

std::string fabric_version() { return fabric::library().version_text(); }

}  // namespace unisono
