// GPU memory across nodes: scratch, copies and sums, all of them on the stream of the call.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "core/gpu_space.hpp"
#include "cuda/api.hpp"
#include "cuda/combine.hpp"

namespace unisono::cuda {

class CudaSpace final : public nodes::GpuSpace {
 public:
  explicit CudaSpace(int device);
  // Requires: nothing under way waits for another rank, and no graph that captured a call is launched again.
  ~CudaSpace() override;

  Memory memory() const override { return Memory::device; }
  void* stream() const override { return stream_; }
  // NCCL's start is some 20 us, and nothing else runs on the stream meanwhile.
  std::size_t grain() const override { return std::size_t{1} << 20; }

  void begin(void* stream) override;
  void end() noexcept override;
  bool captured() const override { return capturing_; }
  std::unique_ptr<Mark> mark() override;
  bool idle(void* stream) const override;
  std::shared_ptr<void> enter_thread() const override;

  // Keeps memory that a graph may have captured until the space ends. Other memory is freed in the stream's
  // order when a larger request replaces it.
  byte* scratch(nodes::Scratch purpose, int slot, std::size_t bytes) override;
  void copy(byte* to, const byte* from, std::size_t bytes) override;
  // Requires: at most kManySources sources; every array begins at a multiple of its elements' size.
  void combine(const nodes::Combine& sum) override;
  // Requires: as combine; a piece in its wire form begins at a multiple of 16 bytes.
  void requantise(const nodes::Requantise& sum) override;

 private:
  class Events;
  class EventMark;
  struct Kept {
    byte* data = nullptr;
    std::size_t bytes = 0;
  };

  void load_kernels() const;
  byte* allocate(std::size_t bytes) const;

  int device_;
  std::size_t most_blocks_ = 0;     // of a kernel
  std::shared_ptr<Events> events_;  // marks may outlive the space
  cudaEvent_t last_ = nullptr;      // the end of the last call that no graph captured
  bool ended_one_ = false;          // `last_` has been recorded
  bool ever_captured_ = false;      // a graph may use what `kept_` holds
  std::map<std::pair<nodes::Scratch, int>, Kept> kept_;
  std::vector<byte*> replaced_;  // by larger scratch, and perhaps used by a graph
  // of the call:
  std::optional<OnDevice> on_;
  cudaStream_t stream_ = nullptr;
  bool capturing_ = false;
};

}  // namespace unisono::cuda
