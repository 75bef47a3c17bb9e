// A rank's GPU as a lane over NICs uses it: memory that a NIC reads and writes, and the order between it and
// the caller's stream.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <utility>

namespace unisono::cuda {

// Whole pages of GPU memory as other drivers take them, by a descriptor; none below 0.
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
  // `device`: CUDA ordinal; none: the thread's current GPU, which is enough to pin host memory. UsageError
  // where there is no such GPU; ResourceError where there is none at all, or no CUDA lane in this build.
  static std::unique_ptr<NicGpu> make(std::optional<int> device);
  virtual ~NicGpu() = default;

  // Zeroed memory, freed with its last owner, by any thread. ResourceError where it cannot be had.
  virtual std::shared_ptr<std::byte> memory(std::size_t bytes) const = 0;
  virtual std::shared_ptr<std::byte> pinned(std::size_t bytes) const = 0;  // the host's, for every GPU

  // The pages of `memory` that hold these bytes; none where the driver gives no descriptor.
  virtual Dmabuf dmabuf(const std::byte* at, std::size_t bytes) const = 0;

  // Makes it the thread's current GPU while the result lives: some providers copy by CUDA's calls themselves.
  virtual std::shared_ptr<void> current() const = 0;
  // Whether all that the stream was given is done. UsageError where a graph is being captured from it.
  virtual bool idle(void* stream) const = 0;
  // Enqueues a copy between places of `memory`.
  virtual void copy(const std::byte* from, std::byte* to, std::size_t bytes, void* stream) const = 0;
  // What NICs have written is there for all that is enqueued from now on.
  virtual void take_in() const = 0;

 protected:
  NicGpu() = default;
};

}  // namespace unisono::cuda
