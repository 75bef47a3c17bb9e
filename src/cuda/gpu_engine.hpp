// The engine of this build: class GpuEngine. engine.cpp makes it and has its failures, symmetric.cpp its
// memory and areas. Its calls are in calls.cpp; those that are exchanges in exchange_calls.cpp, those by copy
// engines in copy_calls.cpp; those of a window in window_calls.cpp.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "cuda/api.hpp"
#include "cuda/engine.hpp"
#include "cuda/exchange.hpp"
#include "cuda/layout.hpp"
#include "cuda/memory.hpp"
#include "cuda/programs.hpp"
#include "host/group.hpp"

namespace unisono::cuda {

inline constexpr int kMostLineBlocks = 96;                         // where no table has asked for more
inline constexpr int kMostStagedBlocks = 32;                       // through host memory
inline constexpr int kMostBlocksOfMany = 64;                       // of more than kFewRanks ranks
inline constexpr std::size_t kMostRings = std::size_t{128} << 20;  // bytes of their chunks, on each GPU
inline constexpr Shape kBeside{16, 256, std::size_t{32} << 10};    // of a kernel beside copy engines
// Of packets and lines, which count narrowly; and where all_to_all_v cuts its parts.
inline constexpr std::size_t kMostMessage = std::size_t{1} << 31, kSlice = kMostMessage / 2;

class GpuEngine final : public Engine {
 public:
  GpuEngine(Group& group, const Options& options);

  ~GpuEngine() override;

  int device() const override { return device_; }
  bool peer_access() const override { return peer_access_; }
  bool nvlink() const override { return nvlink_; }
  std::string_view card() const override { return card_; }

  Place place(const byte* at, std::size_t bytes) const override;

  // The buffers that peers read or store into; where the root's lies, the others know by their own at the
  // same offset. A buffer that only its own rank touches may be anywhere: in place, the root's does not tell
  // of theirs.
  bool symmetric(const Request& request) const override;

  Shape shape(Collective collective, Algorithm algorithm, const Shape& planned,
              std::size_t bytes) const override {
    if (algorithm == Algorithm::copy_engine && !traits_of(collective).combines)
      return blocks_ < kBeside.blocks ? Shape{} : kBeside;
    return cut(algorithm, asked_.value_or(planned), unit_of(collective, algorithm, bytes));
  }
  void set_shape(const std::optional<Shape>& shape) override { asked_ = shape; }

  bool carries(Collective collective, Algorithm algorithm, std::size_t bytes) const override {
    if (algorithm == Algorithm::copy_engine && collective == Collective::reduce && group_.size() > 2)
      return false;
    if ((is_lines(algorithm) && !nvlink_) || (is_direct(algorithm) && !peer_access_)) return false;
    if (many() && !runs_on_many(algorithm)) return false;
    return traits_of(algorithm).pieces == Pieces::chunks || traits_of(collective).by_parts() ||
           longest(collective, algorithm, bytes) < kMostMessage;
  }

  void run(const Request& request, Algorithm algorithm, const Shape& planned, std::uint64_t call, int to,
           int from) override;

  std::shared_ptr<void> allocate(std::size_t bytes) override;
  AreaParts make_area(std::size_t bytes, int signals, const std::string& name,
                      const Explain& explain) override;
  int take(void* stream) override;
  int most_blocks() const override { return blocks_; }
  Exchange exchange_of(Collective collective, bool lines, std::uint64_t call) const override;
  void start(const void* kernel, void* parameter, const Grid& grid, void* stream) const override;
  bool clusters() const override { return clusters_; }
  void begin_window(const device::Handle& area, void* stream) const override;
  void put_signal(const device::Handle& area, std::span<const byte> source, int peer, std::size_t offset,
                  std::uint32_t count, void* stream) const override;
  void wait_signals(WindowWait& wait, void* stream) const override;
  std::shared_ptr<void> register_memory(const MemoryRange& range) override;
  void end_registration(const std::function<void()>& meet) override;

  void set_timeout(double timeout_s) override { timeout_s_ = timeout_s; }
  void check() override;

  void synchronize(void* stream) override;

  void* last_stream() const override { return eager_.stream; }

 private:
  static void check(cudaError_t state, std::string_view what) { cuda::check(state, what); }

  // Whether there are more ranks than exchanges and copy engines take.
  bool many() const { return group_.size() > kFewRanks; }

  // Returns the bytes of a chunk: the rings of many ranks take up at most kMostRings.
  std::size_t chunk_bytes() const;

  // Makes what the engine holds; should that fail, `release` takes back what there is.
  void open(const Options& options);
  void release() noexcept;

  // Whether every rank has a GPU of its own, which of them are this process's, and whether all reach each
  // other.
  void meet_cards(const Options& options);

  // Returns the kind of memory that peers reach.
  static DeviceMemory::Kind kind_for_peers();
  // `bytes` of every rank, in rank order; of kind local only this rank's. Everyone gets it, or nobody.
  std::vector<std::shared_ptr<DeviceMemory>> share(std::size_t bytes, DeviceMemory::Kind kind);

  // The peers' parts, then this rank's: between the two the ranks `meet`, since CUDA wants what is shared by
  // cudaIpc closed before it is freed.
  void free_dropped(const std::function<void()>& meet);

  // Makes memory of which every rank has a part symmetric. Returns what is dropped to end that.
  std::shared_ptr<void> publish(std::vector<std::shared_ptr<DeviceMemory>> parts);
  // Drops what is registered still: what is symmetric may outlive the engine, but keeps no memory of the
  // user's.
  void drop_registered();

  // A kernel that is loaded when it is first launched may wait for one that waits for this rank. Finds out
  // whether kernels may start early.
  void load_kernels();

  std::vector<cudaEvent_t*> events() {
    std::vector<cudaEvent_t*> all{&turn_, &fork_, &join_};
    for (cudaEvent_t& one : combined_) all.push_back(&one);
    return all;
  }

  // Tells the kernels when a peer is lost, and the peers when this rank's kernels have failed.
  void watch(const std::stop_token& stop);

  // What the device's record says.
  unisono::Failure story() const;
  std::string story_of_wait() const;
  std::string who_has_waited() const;

  // The bytes that a program's rounds cut up: the same on every rank.
  std::size_t unit_of(Collective collective, Algorithm algorithm, std::size_t bytes) const;

  // The ranks that have a shard each; a root has none of what the others do for it.
  int owners(Collective collective, Algorithm algorithm) const;

  // line_unit: the bytes of a message that one thread has in a line.
  Shape cut(Algorithm algorithm, const Shape& asked, std::size_t unit,
            std::size_t line_unit = kLineUnit) const;

  // Of packets and lines: the bytes of the longest message between two ranks. Of a call by parts, of those
  // that this rank has.
  std::size_t longest(Collective collective, Algorithm algorithm, std::size_t bytes) const;
  static std::size_t longest_part(const Request& request);
  void one_step(Exchange& x, const Request& request, int to, int from) const;
  void two_steps(Exchange& x, const Request& request, std::size_t shard) const;
  void exchange(const Request& request, Algorithm algorithm, const Shape& asked, std::uint64_t call, int to,
                int from, cudaStream_t stream) const;
  void exchange_slices(const Request& request, Algorithm algorithm, const Shape& asked, std::uint64_t call,
                       cudaStream_t stream) const;
  void start(const void* kernel, void* parameter, const Shape& shape, cudaStream_t stream) const {
    start(kernel, parameter, Grid{.blocks = shape.blocks, .threads = shape.threads}, stream);
  }
  template <int kMost>
  void launch(const void* kernel, LaunchOf<kMost>& launch, const Shape& shape, cudaStream_t stream) const {
    launch.context.piece_bytes = shape.piece_bytes;
    start(kernel, &launch, shape, stream);
  }
  // The kernel's parameter, but for what it reaches of peers; and that.
  template <int kMost>
  LaunchOf<kMost> launch_of(const Request& request, std::uint64_t call, int to, int from) const;
  template <int kMost>
  void reach_peers(LaunchOf<kMost>& launch, const Request& request, int from) const;
  std::uint64_t timeout_ns() const { return static_cast<std::uint64_t>(timeout_s_ * 1e9); }
  template <int kMost>
  ContextOf<kMost> context() const;
  template <int kMost>
  void run_program(LaunchOf<kMost>& launch, const Request& request, Algorithm algorithm, const Shape& asked,
                   cudaStream_t stream) const;
  void run_by_engine(const Launch& launch, const Request& request, const Shape& asked, std::uint64_t call,
                     cudaStream_t stream);
  // Not of 0 bytes, nor to where they are.
  static void copy(byte* to, const byte* from, std::size_t bytes, cudaStream_t stream);
  void copy_by_engine(const Launch& launch, Collective collective, cudaStream_t stream);
  void all_reduce_by_engine(const Launch& launch, std::size_t bytes, const Shape& asked, cudaStream_t stream);
  void reduce_by_engine(const Launch& launch, const Shape& asked, cudaStream_t stream);
  // Combines launch.inputs into a part of the output.
  void combine(Launch& launch, Range part, const Shape& asked, cudaStream_t stream) const;
  void meet(const Launch& given, cudaStream_t stream) const;
  // What follows on `later` waits for what is on `earlier` now.
  void order(cudaStream_t earlier, cudaStream_t later, cudaEvent_t event) const;

  // The symmetric allocation that has these bytes of mine, or null, and where; under the lock of symmetric_.
  struct Allocation {
    std::vector<std::shared_ptr<DeviceMemory>> parts;  // of every rank
    std::vector<byte*> seen;                           // where every rank has mapped mine
  };
  struct Found {
    const Allocation* allocation = nullptr;
    Place place;
  };
  Found find(const byte* at, std::size_t bytes) const;

  // Where a peer has this buffer of mine mapped, or null.
  byte* seen_by(int peer, const byte* at, std::size_t bytes) const;

  // A communicator's calls follow each other, on whichever streams they are: eager ones, and those of a
  // capture.
  void take_turn(cudaStream_t stream);

  Group& group_;
  int device_;
  bool peer_access_ = true, nvlink_ = true;
  std::string card_;
  std::atomic<double> timeout_s_;  // of kernels that start later
  int blocks_ = 0;
  std::vector<int> neighbours_;  // GPUs of other ranks of this process
  Layout layout_;
  std::vector<std::shared_ptr<DeviceMemory>> scratch_;
  Failure* failure_ = nullptr;
  std::vector<byte*> bases_;  // every rank's scratch
  Context base_;              // its bases: of few ranks
  std::optional<Shape> asked_;
  cudaStream_t side_ = nullptr, tell_ = nullptr;  // beside the caller's, and of the watcher
  struct Last {
    cudaStream_t stream = nullptr;
    unsigned long long capture = ~0ull;  // 0: none; at first no call's
  };
  Last eager_, captured_;               // of the last eager call and of the last captured one
  bool early_ = false;                  // kernels may start before the last one has ended
  bool clusters_ = false;               // kernels may have clusters of several blocks
  static constexpr int kMostParts = 3;  // of an all_reduce by copy engines
  cudaEvent_t turn_ = nullptr, fork_ = nullptr, join_ = nullptr, combined_[kMostParts] = {};
  struct Symmetric {
    std::mutex mutex;  // buffers are given back from any thread
    // Freeing waits for the whole GPU, where a kernel may wait for what this thread has yet to enqueue, and
    // breaks captures of graphs: what is dropped is left to the next `allocate`, which waits anyway.
    std::map<std::uint32_t, Allocation> all, dropped;
    std::uint32_t made = 0;
    struct Area {
      std::string name;
      Explain explain;
    };
    std::vector<Area> areas;  // all device areas that were made
  };
  std::shared_ptr<Symmetric> symmetric_ = std::make_shared<Symmetric>();
  std::jthread watcher_;
};

}  // namespace unisono::cuda
