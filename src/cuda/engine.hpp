// What a communicator has on its GPU: scratch that every rank reaches, symmetric memory, and the launches of
// the CUDA lane's kernels on the caller's streams.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/backend.hpp"
#include "core/plan.hpp"
#include "core/request.hpp"

namespace unisono {

class Group;

namespace cuda {

struct Exchange;
struct WindowWait;

inline constexpr int kMostBlocks = 128;  // of a kernel

// Calls come in the same order on every rank, as for the communicator; they only enqueue. A kernel that has
// waited past the deadline ends, and so do all that follow; the next `check` or `synchronize` raises that.
class Engine {
 public:
  struct Options {
    int device = 0;
    int max_sms = 0;  // that a kernel may take; 0: as many as pay
    bool peer_access = true;
    double timeout_s = 30;
  };
  // Collective. UsageError when there is no such GPU, or two ranks have the same; ResourceError when memory
  // cannot be had or shared, or this build has no CUDA lane.
  static std::unique_ptr<Engine> make(Group& group, const Options& options);
  virtual ~Engine() = default;

  virtual int device() const = 0;
  // The name of the ranks' GPUs; empty where they differ.
  virtual std::string_view card() const = 0;

  // Whether every pair of the ranks' GPUs reaches each other's memory, and every rank lets it. Otherwise
  // scratch lies in pinned host memory and nothing is symmetric: programs in push form are all that runs.
  virtual bool peer_access() const = 0;

  // Whether they do so over NVLink, as far as this can be known: lines of 128 bytes arrive whole over nothing
  // else.
  virtual bool nvlink() const = 0;

  // Whether direct programs reach the peers' buffers in such a call, where these are symmetric. In place, an
  // all_to_all would overwrite what its owner has not sent.
  bool reaches(Collective collective, bool in_place) const {
    const CollectiveTraits& traits = traits_of(collective);
    return peer_access() && (traits.stores.in || traits.stores.out) && !(traits.swaps && in_place);
  }
  // Whether the buffers that a direct program reaches lie in symmetric memory of this rank.
  virtual bool symmetric(const Request& request) const = 0;
  virtual Place place(const byte* at, std::size_t bytes) const = 0;

  // Whether an algorithm runs on these GPUs, and takes messages as long as those of a call of `bytes`.
  virtual bool carries(Collective collective, Algorithm algorithm, std::size_t bytes) const = 0;

  // What an automatic call takes: the plan's choice, or what stands in where that cannot run.
  Algorithm choose(const Plan& plan, Collective collective, std::size_t bytes, bool symmetric,
                   bool in_place) const;

  // Enqueues a call, cut as the plan says. `to` and `from` are those of a send_recv; -1 leaves that half out.
  virtual void run(const Request& request, Algorithm algorithm, const Shape& planned, std::uint64_t call,
                   int to, int from) = 0;
  virtual Shape shape(Collective collective, Algorithm algorithm, const Shape& planned,
                      std::size_t bytes) const = 0;
  // The shape of the calls that follow, for measurements; none: the plan's. The same on every rank.
  virtual void set_shape(const std::optional<Shape>& shape) = 0;

  // Collective over the group's host lane; waits for the GPU. What it gives may be dropped at any time and
  // from any thread, and is freed by the next `allocate` or with the engine and its last buffer.
  virtual std::shared_ptr<void> allocate(std::size_t bytes) = 0;
  // Makes a DeviceArea of such memory. Collective as `allocate`. Throws UsageError without NVLink.
  virtual AreaParts make_area(std::size_t bytes, int signals, const std::string& name,
                              const Explain& explain) = 0;
  // As Impl::take_gpu, which returns most_blocks(): the same on every rank.
  virtual int take(void* stream) = 0;
  virtual int most_blocks() const = 0;

  // Returns an exchange with every peer, whose messages a kernel of a layer above describes. No rank has more
  // than kFewRanks - 1 peers. call: the number of the call, for the text of errors.
  virtual Exchange exchange_of(Collective collective, bool lines, std::uint64_t call) const = 0;
  // How such a kernel is started. A cluster of several blocks needs `clusters()`.
  struct Grid {
    int blocks = 1, threads = 32;
    unsigned cluster = 1;
    std::size_t shared_bytes = 0;
  };
  // Starts a kernel, early if kernels may, after `take`. The kernel begins with follow_last_kernel().
  virtual void start(const void* kernel, void* parameter, const Grid& grid, void* stream) const = 0;
  virtual bool clusters() const = 0;

  // The calls of a window (unisono/window.hpp) on its area. count: of this rank's signals there, this one
  // included.
  virtual void begin_window(const device::Handle& area, void* stream) const = 0;
  virtual void put_signal(const device::Handle& area, std::span<const byte> source, int peer,
                          std::size_t offset, std::uint32_t count, void* stream) const = 0;
  virtual void wait_signals(WindowWait& wait, void* stream) const = 0;

  // Registers memory of the user's on every rank, or throws on every rank. Collective over the group's host
  // lane. The result is dropped before `end_registration`, or is left to the engine's end.
  virtual std::shared_ptr<void> register_memory(const MemoryRange& range) = 0;
  // Waits for the GPU, and lets go of what was dropped. meet: meets the ranks, of whom none reaches it then.
  virtual void end_registration(const std::function<void()>& meet) = 0;

  // Sets the deadline of kernels that start later. From any thread.
  virtual void set_timeout(double timeout_s) = 0;
  virtual void check() = 0;
  virtual void synchronize(void* stream) = 0;

  // Of the last call that no graph has captured, for which the next such may have to wait.
  virtual void* last_stream() const = 0;

 protected:
  Engine() = default;
};

}  // namespace cuda
}  // namespace unisono
