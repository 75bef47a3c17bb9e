// The MPI that mpi4py has loaded, as MpiTransport's Api.
#pragma once

#include <dlfcn.h>
#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "held.hpp"
#include "unisono/error.hpp"

namespace unisono::python {

namespace nb = nanobind;

// Handle: MPI's type of a communicator, a datatype and a request: int in MPICH and Intel MPI, a pointer in
// Open MPI.
template <class Handle>
class LoadedMpi {
 public:
  using Request = Handle;
  struct Status {
    alignas(16) std::byte bytes[64];  // larger than any MPI's
  };

  // owner: the MpiBootstrap whose communicator is used. Requires the GIL.
  explicit LoadedMpi(nb::handle owner)
      : owner_(hold(nb::borrow(owner))), functions_(std::make_shared<const Functions>()) {
    const nb::module_ mpi = nb::module_::import_("mpi4py.MPI");
    comm_ = handle(mpi, owner.attr("communicator"));
    byte_ = handle(mpi, mpi.attr("BYTE"));
    any_source_ = nb::cast<int>(mpi.attr("ANY_SOURCE"));
    truncate_ = nb::cast<int>(mpi.attr("ERR_TRUNCATE"));
    if (nb::cast<std::size_t>(mpi.attr("_sizeof")(mpi.attr("Status"))) > sizeof(Status))
      refuse("a larger MPI_Status");
    source_at_ = place_of_source(mpi);
  }

  int isend(const void* data, int bytes, int rank, int tag, Request* request) const {
    return functions_->isend(data, bytes, byte_, rank, tag, comm_, request);
  }
  int irecv(void* data, int bytes, int rank, int tag, Request* request) const {
    return functions_->irecv(data, bytes, byte_, rank, tag, comm_, request);
  }
  int test(Request* request, int* flag, Status* status) const {
    return functions_->test(request, flag, status);
  }
  int get_count(const Status* status, int* bytes) const {
    return functions_->get_count(status, byte_, bytes);
  }
  int probe_any(int tag, int* flag, int* source, int* bytes) const {
    Status status;
    const int code = functions_->iprobe(any_source_, tag, comm_, flag, &status);
    if (code != 0 || !*flag) return code;
    std::memcpy(source, status.bytes + source_at_, sizeof *source);
    return functions_->get_count(&status, byte_, bytes);
  }
  int recv_from_any(void* data, int bytes, int tag) const {
    Status status;
    return functions_->recv(data, bytes, byte_, any_source_, tag, comm_, &status);
  }
  bool running() const {
    int begun = 0, ended = 0;
    functions_->initialized(&begun);
    functions_->finalized(&ended);
    return begun && !ended;
  }
  bool truncated(int code) const {
    int error_class = code;
    functions_->error_class(code, &error_class);
    return error_class == truncate_;
  }
  std::string text(int code) const {
    std::string text(8192, '\0');  // bytes: more than any MPI's maximum
    int length = 0;
    functions_->error_string(code, text.data(), &length);
    text.resize(static_cast<std::size_t>(length));
    return text;
  }
  void abandon() const {
    const nb::gil_scoped_acquire gil;
    owner_->attr("abandon")();
  }

 private:
  struct Functions {
    int (*isend)(const void*, int, Handle, int, int, Handle, Handle*);
    int (*irecv)(void*, int, Handle, int, int, Handle, Handle*);
    int (*test)(Handle*, int*, Status*);
    int (*get_count)(const Status*, Handle, int*);
    int (*iprobe)(int, int, Handle, int*, Status*);
    int (*recv)(void*, int, Handle, int, int, Handle, Status*);
    int (*initialized)(int*);
    int (*finalized)(int*);
    int (*error_class)(int, int*);
    int (*error_string)(int, char*, int*);

    Functions() {
      const nb::object file = nb::module_::import_("mpi4py.MPI").attr("__file__");
      void* library = ::dlopen(nb::cast<const char*>(file), RTLD_NOW | RTLD_NOLOAD);
      find(library, "MPI_Isend", isend);
      find(library, "MPI_Irecv", irecv);
      find(library, "MPI_Test", test);
      find(library, "MPI_Get_count", get_count);
      find(library, "MPI_Iprobe", iprobe);
      find(library, "MPI_Recv", recv);
      find(library, "MPI_Initialized", initialized);
      find(library, "MPI_Finalized", finalized);
      find(library, "MPI_Error_class", error_class);
      find(library, "MPI_Error_string", error_string);
    }
    template <class Function>
    static void find(void* library, const char* name, Function& function) {
      void* const found = library ? ::dlsym(library, name) : nullptr;
      if (!found) refuse(std::string("no ") + name);
      function = reinterpret_cast<Function>(found);
    }
  };

  [[noreturn]] static void refuse(const std::string& what) {
    throw ResourceError("mpi4py's MPI has " + what +
                        ": install mpi4py 4.1 or newer, or set UNISONO_TRANSPORT=gloo.");
  }
  static Handle handle(nb::handle mpi, nb::handle object) {
    if (nb::cast<std::size_t>(mpi.attr("_sizeof")(object)) != sizeof(Handle))
      refuse("handles of another size");
    const auto address = nb::cast<std::uintptr_t>(mpi.attr("_addressof")(object));
    Handle value;
    std::memcpy(&value, reinterpret_cast<const void*>(address),
                sizeof value);  // NOLINT(performance-no-int-to-ptr)
    return value;
  }

  // Returns where MPI_Status has MPI_SOURCE, which differs among MPIs.
  static std::size_t place_of_source(nb::handle mpi) {
    constexpr int kMark = 0x5eed5eed;
    const nb::object status = mpi.attr("Status")();
    status.attr("source") = kMark;
    const auto address = nb::cast<std::uintptr_t>(mpi.attr("_addressof")(status));
    const auto* const bytes =
        reinterpret_cast<const std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
    const auto size = nb::cast<std::size_t>(mpi.attr("_sizeof")(status));
    for (std::size_t at = 0; at + sizeof kMark <= size; at += sizeof kMark)
      if (std::memcmp(bytes + at, &kMark, sizeof kMark) == 0) return at;
    refuse("an MPI_Status without a source");
  }

  Held owner_;
  std::shared_ptr<const Functions> functions_;
  Handle comm_{}, byte_{};
  int any_source_ = 0, truncate_ = 0;
  std::size_t source_at_ = 0;  // in Status
};

}  // namespace unisono::python
