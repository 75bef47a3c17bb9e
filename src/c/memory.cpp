// Symmetric and registered memory of the C interface.
#include <memory>

#include "c/arguments.hpp"

using namespace unisono;
using namespace unisono::c;

struct unisono_buffer {
  Buffer buffer;
};
struct unisono_registration {
  Registration registration;
};

int unisono_empty(unisono_comm* comm, std::size_t bytes, std::int32_t memory, unisono_buffer** buffer) {
  return guarded([&] {
    given(buffer, "buffer") = nullptr;
    auto made = std::make_unique<unisono_buffer>();
    made->buffer = given(comm, "comm").communicator.empty(bytes, memory_of(memory));
    *buffer = made.release();
  });
}

void* unisono_buffer_data(const unisono_buffer* buffer) { return buffer ? buffer->buffer.data() : nullptr; }

void unisono_buffer_free(unisono_buffer* buffer) { delete buffer; }

int unisono_register(unisono_comm* comm, void* data, std::size_t bytes, std::int32_t memory,
                     unisono_registration** registration) {
  return guarded([&] {
    given(registration, "registration") = nullptr;
    auto made = std::make_unique<unisono_registration>();
    made->registration =
        given(comm, "comm")
            .communicator.register_memory({.data = data, .bytes = bytes, .memory = memory_of(memory)});
    *registration = made.release();
  });
}

int unisono_unregister(unisono_registration* registration) {
  const int status = guarded([&] { given(registration, "registration").registration.close(); });
  if (status != UNISONO_ERROR_USAGE) delete registration;
  return status;
}
