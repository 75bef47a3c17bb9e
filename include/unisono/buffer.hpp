// Memory that every rank of a communicator reaches.
#pragma once

#include <cstddef>
#include <memory>

namespace unisono {

// This rank's part. The memory stays valid when the communicator is closed, and is freed with the last copy.
class Buffer {
 public:
  Buffer() = default;
  void* data() const { return data_.get(); }
  std::size_t bytes() const { return bytes_; }

 private:
  friend class Communicator;
  Buffer(std::shared_ptr<void> data, std::size_t bytes) : data_(std::move(data)), bytes_(bytes) {}
  std::shared_ptr<void> data_;
  std::size_t bytes_ = 0;
};

}  // namespace unisono
