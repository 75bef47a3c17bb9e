// NCCL, opened when it is first used: the few functions that messages need. Source of the declarations:
// nccl.h of NCCL 2.28; they have been the same since 2.13.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace unisono::nccl {

inline constexpr int kSuccess = 0, kInProgress = 7;  // ncclResult_t
inline constexpr int kBytes = 1;                     // ncclUint8, of ncclDataType_t

struct UniqueId {
  char internal[128];
};
using Comm = void*;    // ncclComm_t
using Stream = void*;  // cudaStream_t

// A call of NCCL failed, or the library is not there. The text has no full stop.
class NcclError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Library {
  int (*get_unique_id)(UniqueId*);
  int (*comm_init_rank)(Comm*, int size, UniqueId, int rank);
  int (*comm_abort)(Comm);
  int (*comm_get_async_error)(Comm, int*);
  int (*group_start)();
  int (*group_end)();
  int (*send)(const void*, std::size_t count, int type, int peer, Comm, Stream);
  int (*recv)(void*, std::size_t count, int type, int peer, Comm, Stream);
  const char* (*get_error_string)(int);
  const char* (*get_last_error)(Comm);
};

// Returns the library: UNISONO_NCCL if that is set; else libnccl.so.2 as the process or the system has it;
// else that of pip's package nvidia-nccl beside this library's own folder. Throws NcclError if there is none,
// or one without a function.
const Library& library();

// Throws NcclError with NCCL's own words unless the call has succeeded. name: the function.
void check(int result, const char* name);

}  // namespace unisono::nccl
