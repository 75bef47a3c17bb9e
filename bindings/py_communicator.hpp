// unisono.Communicator: a Communicator whose calls take Python arrays. Docstrings are in docstrings.hpp.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "arguments.hpp"
#include "array.hpp"
#include "batch.hpp"
#include "docstrings.hpp"
#include "py_bound.hpp"
#include "py_work.hpp"
#include "unisono/communicator.hpp"
#include "unisono/tuning.hpp"

namespace unisono::python {

class PyRegistration;

class PyCommunicator {
 public:
  using Algorithm = std::optional<std::string>;

  PyCommunicator(std::shared_ptr<Bootstrap> bootstrap, const Communicator::Options& options)
      : communicator_(std::move(bootstrap), options) {}
  explicit PyCommunicator(Communicator communicator) : communicator_(std::move(communicator)) {}
  ~PyCommunicator() {
    if (!begun_.empty()) close();  // while the thread of the calls can have the GIL
  }

  int rank() const { return communicator_.rank(); }
  int size() const { return communicator_.size(); }
  std::vector<std::vector<int>> nodes() const { return communicator_.nodes(); }
  std::string transport() const { return communicator_.transport(); }
  bool closed() const { return communicator_.closed(); }
  bool check() const { return communicator_.check(); }
  void set_check(bool check) { communicator_.set_check(check); }
  std::optional<int> device() const { return communicator_.device(); }
  bool peer_access() const { return communicator_.peer_access(); }
  bool nvlink() const { return communicator_.nvlink(); }
  std::string card() const { return std::string(communicator_.card()); }

  // Releases the GIL, if a call of this thread has kept it. For Communicator::Options::before_rest.
  static void release_gil();

  // Closes the communicator. A waiting call of another thread ends with a UsageError, and has come back to
  // Python when this returns, so that the interpreter may end. So do calls that have begun.
  void close();

  void barrier();
  nb::object all_reduce(nb::handle x, const OpName& op, nb::handle out, const Algorithm& algorithm,
                        nb::handle stream, const std::optional<std::string>& wire, double factor);
  nb::object reduce(nb::handle x, const RankNumber& root_number, const OpName& op, nb::handle out,
                    const Algorithm& algorithm, nb::handle stream, double factor);
  nb::object broadcast(nb::handle x, const RankNumber& root_number, nb::handle out,
                       const Algorithm& algorithm, nb::handle stream);
  nb::object all_gather(nb::handle x, nb::handle out, const Algorithm& algorithm, nb::handle stream);
  nb::object gather(nb::handle x, const RankNumber& root_number, nb::handle out, const Algorithm& algorithm,
                    nb::handle stream);
  nb::object reduce_scatter(nb::handle x, const OpName& op, nb::handle out, const Algorithm& algorithm,
                            nb::handle stream, double factor);
  nb::object scatter(nb::handle x, const RankNumber& root_number, nb::handle out, const Algorithm& algorithm,
                     nb::handle stream);
  nb::object all_to_all(nb::handle x, nb::handle out, const Algorithm& algorithm, nb::handle stream);
  nb::object all_to_all_v(nb::handle x, nb::handle send_counts, nb::handle recv_counts, nb::handle out,
                          const Algorithm& algorithm, nb::handle stream);
  void send(nb::handle x, const RankNumber& peer, const Algorithm& algorithm, nb::handle stream,
            std::optional<int> tag);
  nb::object recv(nb::handle out, const RankNumber& peer, const Algorithm& algorithm, nb::handle stream,
                  std::optional<int> tag);
  nb::object send_recv(nb::handle x, const RankNumber& dst, nb::handle out, const RankNumber& src,
                       const Algorithm& algorithm, nb::handle stream);
  void batch_send_recv(const Messages& sends, const Messages& receives, nb::handle stream);

  // Returns null for a color below 0.
  std::unique_ptr<PyCommunicator> split(int color, int key);
  void synchronize(nb::handle stream);
  nb::object empty(nb::handle shape, nb::handle dtype, const std::optional<std::string>& device);
  PyRegistration register_array(nb::object x);

  std::string plan(const std::string& collective, std::size_t bytes, bool symmetric,
                   const std::optional<std::string>& device, bool in_place,
                   const std::optional<std::string>& wire);
  int sms(const std::string& collective, std::size_t bytes, const std::string& algorithm, bool symmetric,
          bool in_place);
  void set_plan(const PlanRows& rows, const std::optional<std::string>& device);
  void set_shape(int blocks, int threads, std::size_t piece_bytes) {
    Tuning(communicator_).set_shape(blocks, threads, piece_bytes);
  }
  std::string kernel_copies() { return std::string(Tuning(communicator_).kernel_copies()); }
  void reset_shape() { Tuning(communicator_).reset_shape(); }

  void raise_if_failed() { communicator_.raise_if_failed(); }

  // Returns the method with two further parameters. If `asynchronous` is true, the call begins, and its Work
  // is returned. timeout_s: the call's own deadline.
  template <class R, class... A>
  static auto may_begin(R (PyCommunicator::*method)(A...)) {
    return [method](PyCommunicator& self, A... arguments, bool asynchronous,
                    std::optional<double> timeout_s) -> nb::object {
      std::optional<Deadline> deadline;
      if (timeout_s) deadline.emplace(check_timeout_s(*timeout_s));
      std::optional<Beginning> beginning;
      if (asynchronous) beginning.emplace();
      nb::object result = nb::none();
      if constexpr (std::is_void_v<R>) (self.*method)(arguments...);
      else result = (self.*method)(arguments...);
      if (!asynchronous) return result;
      (beginning->keep_argument(arguments), ...);
      beginning->keep(result);
      const auto begun = beginning->begun;
      auto before = std::exchange(self.begun_, {begun});  // dropped last: that may run the program's code
      for (const auto& one : before)
        if (!one->work.done()) self.begun_.push_back(one);
      return nb::cast(PyWork(begun, std::move(result)));
    };
  }

  // Returns a function that binds the method: given this and the method's arguments, it returns a Python
  // function without parameters, which makes the call.
  template <class R, class... A>
  static auto binds(R (PyCommunicator::*method)(A...)) {
    return [method](const Bind& bind, A... arguments) -> nb::callable {
      const auto bound = std::make_shared<PyBound>();
      {
        Beginning binding;
        binding.bound = bound.get();
        auto& self = nb::cast<PyCommunicator&>(bind.communicator);
        if constexpr (std::is_void_v<R>) (self.*method)(arguments...);
        else bound->result = (self.*method)(arguments...);
        (binding.keep_argument(arguments), ...);
        bound->kept = std::move(binding.begun->kept);
      }
      if (!bound->result.is_valid()) bound->result = nb::none();
      return nb::borrow<nb::callable>(nb::cpp_function(
          [bound, communicator = bind.communicator] {
            return nb::cast<PyCommunicator&>(communicator).step(*bound);
          },
          nb::name("step"), doc::kStep));
    };
  }
  struct Bind {  // unisono.Communicator.bind
    nb::object communicator;
  };

 private:
  friend class PyMoe;
  friend class PyWindow;
  friend class PyRegistration;
  friend struct PyNorm;
  friend struct OwnedMoe;
  class WithoutGil;
  struct Options;
  struct Beginning;

  // State of this thread that its calls share, found once in each.
  struct ThisThread {
    Beginning* beginning;  // of the next call
    double timeout_s;      // of its calls; 0: the communicator's
    WithoutGil* inside;    // the call that it is in
  };
  // Not inline: the compiler would find the place anew, in some 2 ns, for each use.
  [[gnu::noinline]] static ThisThread& this_thread();

  // Returns the memory of "cpu" or "cuda". None: the GPU's if the communicator has one, else the host's.
  Memory memory_of(const std::optional<std::string>& device) const;

  // array: the one that determines dtype, memory and stream.
  struct Prepared {
    Call call;
    nb::object stream;
    ThisThread& thread = this_thread();
  };
  void check_device(const Array& array) const;
  Prepared prepare(const Array& array, const void* in, void* out, std::size_t count,
                   const Options& options) const;
  // Keeps the stream of a call on GPU memory that has just been made, if a later call may wait for it.
  void keep_stream(const nb::object& stream, void* handle);
  // Makes a call. Returns what a receive with a tag has taken.
  template <class... Form>
  static Received run_form(Communicator& communicator, const Form&... form);
  // run(call, make): gives `make` the arguments of Communicator::run. Returns as run_form, unless the call
  // only begins. small: see there.
  template <class Run>
  Received call(const Prepared& prepared, const Run& run, bool small = false);
  void call(Collective collective, const Array& array, const void* in, void* out, std::size_t count,
            const Options& options);

  nb::object step(const PyBound& bound);

  // Returns whether a call of `count` elements takes less time than giving the GIL away and back may.
  static bool small(const Call& call, std::size_t count) {
    return call.memory == Memory::host && count * size_of(call.dtype) <= 4096;
  }
  static bool small(const Call& call) { return small(call, call.count); }
  // Returns whether a small call that tells of its waits may keep the GIL until then: if it need not wait for
  // calls of other threads, which may need the GIL to end.
  bool may_keep_gil() const {
    return tells_before_rest_ && calls_inside_ == 0 &&
           std::ranges::all_of(begun_, [](const auto& one) { return one->work.done(); });
  }

  // While one lives, this thread's next call begins and does not wait, or is only noted in `bound`.
  struct Beginning {
    Beginning() { this_thread().beginning = this; }
    ~Beginning() { this_thread().beginning = nullptr; }
    Beginning(const Beginning&) = delete;
    void keep(const nb::object& owner) {
      if (owner.is_valid()) begun->kept.append(owner);
    }
    // Keep what has a buffer of the call.
    void keep_argument(nb::handle argument) { begun->kept.append(argument); }
    void keep_argument(const Messages& messages) {
      for (const auto& [array, peer] : messages) begun->kept.append(array);
    }
    template <class Other>
    void keep_argument(const Other&) {}
    const std::shared_ptr<PyBegun> begun = std::make_shared<PyBegun>();
    PyBound* bound = nullptr;
  };

  // While one lives, this thread's calls have that deadline.
  struct Deadline {
    explicit Deadline(double seconds) { this_thread().timeout_s = seconds; }
    ~Deadline() { this_thread().timeout_s = 0; }
    Deadline(const Deadline&) = delete;
  };

  int calls_inside_ = 0;                         // changed with the GIL only
  std::vector<std::shared_ptr<PyBegun>> begun_;  // calls that may not have ended; changed with the GIL only
  nb::object last_stream_;  // communicator_.last_stream(), which must live until the next call
  Communicator communicator_;
  const bool tells_before_rest_ = communicator_.tells_before_rest();
};

// The time of a call inside the core, without the GIL. keeps: with the GIL, until the call rests in a wait.
class PyCommunicator::WithoutGil {
 public:
  explicit WithoutGil(PyCommunicator& communicator, bool keeps = false, ThisThread& thread = this_thread())
      : communicator_(communicator), thread_(thread), around_(std::exchange(thread.inside, this)) {
    ++communicator_.calls_inside_;
    if (!keeps) release();
  }
  ~WithoutGil() {
    if (released_) PyEval_RestoreThread(released_);
    --communicator_.calls_inside_;
    thread_.inside = around_;
  }
  WithoutGil(const WithoutGil&) = delete;
  void release() {
    if (!released_) released_ = PyEval_SaveThread();
  }

 private:
  PyCommunicator& communicator_;
  ThisThread& thread_;
  WithoutGil* const around_;           // a signal handler may make a call within one
  PyThreadState* released_ = nullptr;  // null: it has the GIL
};

inline void PyCommunicator::release_gil() {
  if (WithoutGil* const call = this_thread().inside) call->release();
}

// A registration, which keeps its communicator until it is closed.
class PyRegistration {
 public:
  PyRegistration(PyCommunicator& of, Registration registration)
      : of_(nb::find(of)), registration_(std::move(registration)) {}
  void close();
  bool closed() const { return registration_.closed(); }
  std::size_t bytes() const { return registration_.bytes(); }

 private:
  nb::object of_;
  Registration registration_;
};

}  // namespace unisono::python
