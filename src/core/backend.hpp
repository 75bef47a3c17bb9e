// The base of all backends, which carry a communicator's calls: the host (host/backend.hpp), a GPU
// (cuda/backend.hpp), the fabric (fabric/communicator.cpp) or several nodes (nodes/backend.hpp). backends.cpp
// chooses.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/failure.hpp"
#include "base/process.hpp"
#include "core/plan.hpp"
#include "core/request.hpp"
#include "core/turns.hpp"
#include "core/work.hpp"
#include "unisono/communicator.hpp"
#include "unisono/device/handle.hpp"

namespace unisono {

class LocalCommunicator;
namespace cuda {
class Engine;
}

// The parts of a DeviceArea.
struct AreaParts {
  std::shared_ptr<void> memory;  // keeps it
  device::Handle handle;
};
// Says what a record with a problem means (device::Failure::problem).
using Explain = std::function<Failure(const device::Failure&)>;

class [[gnu::visibility("hidden")]] Communicator::Impl {
 public:
  Options options;  // as the communicator was made, for `split`; without the transport
  bool has_transport = false;
  virtual ~Impl();
  explicit Impl(bool check) : check_(check) {}
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual bool closed() const = 0;
  virtual void close() noexcept = 0;
  // Fails the communicator on every rank, unless it has failed already. From any thread.
  virtual void fail(const Failure& failure) noexcept = 0;
  virtual void raise_if_failed() = 0;
  void abort(const std::string& why) {
    if (!closed() && !inherited())
      fail({FailureKind::peer_lost,
            "rank " + std::to_string(number(rank())) +
                " has aborted the communicator: " + (why.empty() ? "see why there." : why)});
  }

  bool check() const { return check_; }
  void set_check(bool check) { check_ = check; }

  void run(Request request) {
    name_algorithm(request);
    turn(request.collective, [&] { run_scaled(request); }, request.call->timeout_s);
  }
  void run_pair(Request request, int to, int from) {
    name_algorithm(request);
    turn(request.collective, [&] { do_run_pair(request, to, from); }, request.call->timeout_s);
  }
  // Runs a message with a tag, and begins one.
  Received run(const Message& message) {
    check_open(message.what());
    return do_message(with_deadline(message));
  }
  Work begin(const Message& message) {
    check_open(message.what());
    return Work(do_begin(with_deadline(message)));
  }
  // Begins a call, which runs on call_threads_. One on a GPU runs here: it only enqueues.
  Work begin(const std::shared_ptr<Begun>& call);
  // Closes the communicator, and waits until the calls that have begun have ended.
  void end_begun() noexcept;
  // Waits until calls that have begun have ended, with their callbacks. Requires: close().
  void settle() noexcept;
  void barrier(const Call& call = {}) {
    check_timeout(call);
    turn(Collective::barrier, [&] { do_barrier(); }, call.timeout_s);
  }
  std::shared_ptr<void> allocate(std::size_t bytes, Memory memory) {
    return turn(Collective::empty, [&] { return do_allocate(bytes, memory); });
  }
  // Makes a DeviceArea. Collective. name: of what its kernels do, for the text of errors.
  // explain: of kernels that report problems of their calls.
  AreaParts make_area(std::size_t bytes, int signals, const std::string& name, const Explain& explain = {}) {
    return turn("device_area", [&] { return do_make_area(bytes, signals, name, explain); });
  }
  // As Communicator::register_memory and Registration::close.
  std::shared_ptr<Registration::State> register_memory(MemoryRange range);
  void end(Registration::State& one);

  // Operations beside the collectives, such as src/moe, are built of what follows.
  //
  // Runs `body` as one call of the communicator: one at a time, in the order in which they come, numbered for
  // the text of errors, and refused if the communicator is closed or has failed. An exception that is no
  // Error (no memory, an interrupt) ends the call on this rank alone. The rank is then out of step with its
  // peers, and closes. timeout_s: deadline of its waits; 0: the communicator's.
  template <class Body>
  std::invoke_result_t<Body> turn(std::string_view what, const Body& body, double timeout_s = 0) {
    check_thread(what);
    const Turns::Turn turn(turns_, turns_.come());
    return in_turn(what, body, timeout_s);
  }
  // Does the same within a turn that has come.
  template <class Body>
  std::invoke_result_t<Body> in_turn(std::string_view what, const Body& body, double timeout_s) {
    check_closed(what);
    struct End {
      Impl& of;
      ~End() { of.ended(); }
    } const end{*this};
    const Deadline deadline(*this, timeout_s != 0 ? timeout_s : later_timeout_s_.load());
    try {
      enter(what, ++calls_);
      return body();
    } catch (const Error&) { throw; } catch (...) {
      leave();
      throw;
    }
  }
  // Sets the deadline of waits within a call; none: that of the options.
  virtual void set_timeout(std::optional<double> timeout_s) = 0;
  // Does what Communicator::set_timeout says.
  void set_later_timeout(double timeout_s);
  // Sets the deadline of kernels that start later. From any thread.
  virtual void set_gpu_timeout(double) {}
  // Returns the options of a communicator of some of the ranks.
  Options options_of_split() const {
    Options split = options;
    if (later_timeout_s_ != 0) split.timeout_s = later_timeout_s_;
    return split;
  }
  // Tells the lane whether the call that runs is beside its rank's own work, as one that has begun is.
  virtual void run_beside(bool) {}
  // Runs a request within such a call.
  void run_within(Request request) {
    name_algorithm(request);
    run_scaled(request);
  }
  // Messages that have begun. The destructor abandons those that are not over, and other ranks may still
  // write to their memory.
  class Exchange {
   public:
    virtual ~Exchange() = default;
    virtual void wait() = 0;
  };
  // Begins messages within such a call. Returns what ends them, within this call or a later one; null: they
  // are over. Requires: no other messages come before the end.
  virtual std::unique_ptr<Exchange> begin_exchange(std::span<const Outgoing> sends,
                                                   std::span<const Incoming> receives) {
    const Call call{.dtype = DType::u8};
    run_within({call, rank(), size(), sends, receives});
    return nullptr;
  }
  // Meets the ranks of this rank's node within such a call.
  virtual void meet_node() {}
  // Fails the communicator on every rank, since the ranks' calls differ, and throws.
  virtual void disagree(const std::string& text) = 0;
  // Returns a rank's number in the whole job, for the text of errors.
  virtual int number(int rank) const { return rank; }
  // Returns this backend if its ranks share the memory of one machine; else null.
  virtual LocalCommunicator* machine() { return nullptr; }
  // Returns what starts kernels on this rank's GPU; null if it has none.
  virtual cuda::Engine* gpu() { return nullptr; }
  // Returns the number of the call that runs.
  std::uint64_t calls() const { return calls_; }
  // Returns the parts of this node's ranks of symmetric host memory. Requires: they share memory.
  virtual std::vector<byte*> parts_of(const void*) const { return {}; }

  // The GPU's part: communicator.hpp says what each returns. A backend without a GPU refuses.
  virtual std::optional<int> device() const { return std::nullopt; }
  virtual bool peer_access() const { return false; }
  virtual bool nvlink() const { return false; }
  virtual std::string_view card() const { refuse_gpu(); }
  virtual void synchronize(void*) { refuse_gpu(); }
  virtual void* last_stream() const { return nullptr; }
  // Orders what comes on a stream behind the communicator's last call on the GPU. Throws if that has failed.
  // Returns the most blocks that a kernel may have: all are resident at once, beside those of the other ranks
  // of the GPU.
  virtual int take_gpu(void*) { refuse_gpu(); }

  // Tuning: tuning.hpp says what each does. send and recv are asked for as send_recv.
  virtual Algorithm choose(Collective collective, std::size_t bytes, bool symmetric, Memory memory,
                           bool in_place);
  virtual Algorithm choose_wire(std::size_t, Memory) { return Algorithm::two_shot; }  // of quantised calls
  // Returns the algorithm of a message, of a call in which each message goes by its own size.
  virtual Algorithm planned(const Request& request, const Args::Part& part) {
    return plan(request.call->memory).choose(request.collective, part.bytes, false);
  }
  virtual int sms(Collective, std::size_t, bool, Algorithm, bool) { refuse_gpu(); }
  virtual std::string_view kernel_copies() const { return "none"; }
  virtual void set_plan(const std::vector<Plan::Entry>& entries, Level level) {
    if (level == Level::nodes)
      throw UsageError("the ranks are on one node: give it a plan of host or device.");
    plan(level == Level::device ? Memory::device : Memory::host).set(entries);
  }
  virtual void set_shape(const std::optional<Shape>&) { refuse_gpu(); }  // none: the plan's

  // Returns the ranks of each node.
  virtual std::vector<std::vector<int>> nodes() const;
  virtual std::string transport() const { return {}; }
  virtual bool tells_before_rest() const { return false; }

 protected:
  virtual Plan& plan(Memory memory) = 0;
  // Returns the algorithms that a call may name.
  virtual std::vector<Algorithm> algorithms(Collective collective, Memory memory) const {
    return Plan::algorithms(collective, level_of(memory));
  }
  // Returns whether direct programs reach memory that is not symmetric. If not, automatic calls are staged.
  virtual bool reaches_any_memory() const { return false; }

  static constexpr const char* kNoGpu = "the communicator has no GPU: make it with device=, on every rank.";
  [[noreturn]] static void refuse_gpu() { throw UsageError(kNoGpu); }

  // The deadline of a call, unless it is that of the options: 0.
  class Deadline {
   public:
    Deadline(Impl& of, double timeout_s) : of_(timeout_s == 0 ? nullptr : &of) {
      if (of_) of_->set_timeout(timeout_s);
    }
    ~Deadline() {
      if (of_) of_->set_timeout({});
    }
    Deadline(const Deadline&) = delete;

   private:
    Impl* of_;
  };
  class Beside {
   public:
    explicit Beside(Impl& of) : of_(of) { of_.run_beside(true); }
    ~Beside() { of_.run_beside(false); }
    Beside(const Beside&) = delete;

   private:
    Impl& of_;
  };
  static constexpr const char* kNoTags =
      "messages with tags are between ranks of one machine, or of several whose transport has records: leave "
      "the tag out, and make the calls in the same order on both ranks.";
  virtual Received do_message(const Message&) { throw UsageError(kNoTags); }
  virtual std::shared_ptr<Work::State> do_begin(const Message&) { throw UsageError(kNoTags); }
  // Returns the threads of calls that have begun, which it makes.
  CallThreads& call_threads();

  virtual void do_run(Request& request) = 0;
  virtual void do_run_pair(Request& request, int to, int from) = 0;
  virtual void do_barrier() = 0;
  virtual std::shared_ptr<void> do_allocate(std::size_t bytes, Memory memory) = 0;
  virtual AreaParts do_make_area(std::size_t, int, const std::string& name, const Explain&) {
    throw UsageError(
        (name.empty() ? "a device area" : name) +
        " is for ranks of one node with a GPU each: make the communicator there, with device= on "
        "every rank.");
  }
  // Registers the memory of every rank, or throws on every rank. Begins with `agree_to_register`.
  // Returns what keeps the registration on this rank, for dropping after `do_end`, or without it if the ranks
  // cannot meet. Backends may then keep the memory as long as they live.
  virtual std::shared_ptr<void> do_register(const MemoryRange& range) = 0;
  // Meets the ranks, of whom none reaches the memory any more.
  virtual void do_end(Registration::State& one) = 0;
  static constexpr const char* kSymmetricAlready =
      "it is symmetric memory already: use memory of Communicator::empty as it is.";

  static double timeout_of(const Options& options);  // throws UsageError for what is none

  // Returns whether this process was forked from the rank: it has the rank's memory, but must not act for it.
  bool inherited() const { return forks_ != forks(); }
  // Closes the communicator from within a call.
  virtual void leave() noexcept = 0;
  // Begins a call. Throws the communicator's failure, if there is one.
  virtual void enter(std::string_view what, std::uint64_t call) = 0;
  virtual void ended() noexcept {}  // after `enter`, also one that has thrown

  std::uint64_t calls_ = 0;
  bool check_;  // whether the ranks compare their calls first

 private:
  void name_algorithm(Request& request) const {
    if (request.call->timeout_s != 0) check_timeout(*request.call);
    if (!request.call->algorithm.empty())
      request.name_algorithm(algorithms(request.collective, request.call->memory));
    if (request.call->wire != Wire::exact) request.check_wire();
    request.check_factor();
  }
  // Runs a request whose algorithm is named. Scales the rank's input before, if the call has a factor.
  void run_scaled(Request& request);

  template <class Body>
  std::invoke_result_t<Body> turn(Collective collective, const Body& body, double timeout_s = 0) {
    return turn(name_of(collective), body, timeout_s);
  }
  // Throw UsageError. Each call checks: what writes a text is not compiled into it.
  [[noreturn]] static void refuse_closed(std::string_view what);
  [[noreturn]] static void refuse_inherited(std::string_view what);
  [[noreturn]] static void refuse_inside(std::string_view what);
  void check_closed(std::string_view what) const {
    if (closed()) refuse_closed(what);
  }
  // Throws UsageError if this thread cannot make a call.
  void check_open(std::string_view what) const {
    check_closed(what);
    check_thread(what);
  }
  // Throws UsageError if this thread cannot have a turn. Whether the communicator is closed shows in it.
  void check_thread(std::string_view what) const {
    if (inherited()) refuse_inherited(what);
    check_outside(what);
  }
  // Throws UsageError if this thread is within a call, and would wait for itself.
  void check_outside(std::string_view what) const {
    if (turns_.inside()) refuse_inside(what);
  }
  Message with_deadline(Message message) const {
    if (message.timeout_s == 0) message.timeout_s = later_timeout_s_;
    return message;
  }
  std::string problem_of(const MemoryRange& range) const;
  void drop(Registration::State& one) noexcept;

  const unsigned forks_ = forks();
  Turns turns_;
  std::mutex beginning_;  // guards the making of call_threads_
  std::unique_ptr<CallThreads> call_threads_;
  std::vector<std::shared_ptr<Registration::State>> registrations_;
  std::uint64_t registered_ = 0;  // in all
  // A scaled input that the output has no room for. Kept for the next one.
  std::unique_ptr<byte[]> scaled_;
  std::size_t scaled_bytes_ = 0;
  std::atomic<double> later_timeout_s_ = 0;  // of set_later_timeout
};

// An array and the factor of each of its elements.
struct Scaling {
  byte* to;
  const byte* from;  // may be `to`
  std::size_t count;
  DType dtype;
  double factor;
};
// Multiplies, by the kernels of src/host. Requires: takes_factor of the dtype.
void scale(const Scaling& array);

struct [[gnu::visibility("hidden")]] Registration::State {
  Communicator::Impl* of = nullptr;  // null: the registration has ended
  const byte* begin = nullptr;
  std::size_t bytes = 0;
  Memory memory = Memory::host;
  std::uint64_t number = 0;    // the same on every rank
  std::shared_ptr<void> kept;  // of do_register
};

// Makes the backend of ranks that share a machine. Collective. numbers: what errors call each of them; empty:
// by its number here.
std::unique_ptr<Communicator::Impl> make_machine_backend(Bootstrap& bootstrap,
                                                         const Communicator::Options& options,
                                                         const std::vector<int>& numbers);
// Makes the backend that the options ask for, on as many nodes as there are. Collective.
std::unique_ptr<Communicator::Impl> make_backend(const std::shared_ptr<Bootstrap>& bootstrap,
                                                 const Communicator::Options& options);

}  // namespace unisono
