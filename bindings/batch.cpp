#include "batch.hpp"

#include "unisono/error.hpp"

namespace unisono::python {

Batch::Batch(const Messages& sends, const Messages& receives, int size) {
  auto read = [&](const Messages& messages, const char* what, bool written, const auto& add) {
    for (const auto& [array, peer] : messages) {
      const Array& one = arrays.emplace_back(array, written ? "out" : "x", written);
      if (one.memory != arrays[0].memory)
        throw UsageError(
            "the arrays of batch_send_recv are not all on the CPU or all on the GPU: move some.");
      // an empty array may have no address, but is a message; aligned, so that the others keep the fast
      // kernel
      alignas(16) static char nothing = 0;
      void* data = one.data ? one.data : static_cast<void*>(&nothing);
      add(data, one.count * size_of(one.dtype), read_rank(what, peer, size));
    }
  };
  read(sends, "destination", false,
       [&](const void* data, std::size_t bytes, int to) { outgoing.push_back({data, bytes, to}); });
  read(receives, "source", true,
       [&](void* data, std::size_t bytes, int from) { incoming.push_back({data, bytes, from}); });
}

}  // namespace unisono::python
