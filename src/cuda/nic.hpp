// A rank's GPU for a lane over NICs: memory that NICs read and write, and its order with the caller's stream.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <utility>

namespace unisono::cuda {

// A descriptor of whole pages of GPU memory, which other drivers accept. Below 0: none.
struct Dmabuf {
  int descriptor = -1;
  std::byte* begin = nullptr;

  Dmabuf() = default;
  Dmabuf(int given, std::byte* first) : descriptor(given), begin(first) {}
  Dmabuf(Dmabuf&& other) noexcept
      : descriptor(std::exchange(other.descriptor, -1)), begin(std::exchange(other.begin, nullptr)) {}
  ~Dmabuf() {
    if (descriptor >= 0) ::close(descriptor);
  }
};

class NicGpu {
 public:
  // device: a CUDA ordinal; none: the thread's current GPU, which is enough to pin host memory.
  // Throws UsageError if there is no such GPU; ResourceError if there is no GPU, or no CUDA in this build.
  static std::unique_ptr<NicGpu> make(std::optional<int> device);
  virtual ~NicGpu() = default;

  // Returns zeroed memory, which its last owner frees, on any thread. Throws ResourceError.
  virtual std::shared_ptr<std::byte> memory(std::size_t bytes) const = 0;
  virtual std::shared_ptr<std::byte> pinned(std::size_t bytes) const = 0;  // the host's, for every GPU

  // Returns the pages of `memory` that hold these bytes; none if the driver gives no descriptor.
  virtual Dmabuf dmabuf(const std::byte* at, std::size_t bytes) const = 0;

  // Makes this the thread's current GPU while the result lives: some providers call CUDA themselves.
  virtual std::shared_ptr<void> current() const = 0;
  // Returns whether all work of the stream is done. Throws UsageError if a graph is being captured from it.
  virtual bool idle(void* stream) const = 0;
  // Enqueues a copy between places of `memory`.
  virtual void copy(const std::byte* from, std::byte* to, std::size_t bytes, void* stream) const = 0;
  // Makes what NICs have written visible to all work that is enqueued from now on.
  virtual void take_in() const = 0;

 protected:
  NicGpu() = default;
};

}  // namespace unisono::cuda
