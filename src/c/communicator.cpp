// A communicator of the C interface: what it and the library are, and its end.
#include "c/arguments.hpp"
#include "c/enumerations.hpp"

using namespace unisono;
using namespace unisono::c;

int unisono_version() { return library_version(); }

std::int64_t unisono_query(std::int32_t question) {
  switch (question) {
    case UNISONO_NUM_DTYPES: return kDTypes;
    case UNISONO_NUM_OPS: return kOps;
    case UNISONO_NUM_WIRES: return kWires;
    case UNISONO_NUM_COLLECTIVES: return kRunnable;
    case UNISONO_SIZE_OF_CALL: return sizeof(unisono_call);
    case UNISONO_NUM_GPUS: {
      int gpus = 0;
      guarded([&] { gpus = device_count(); });
      return gpus;
    }
    default: return -1;
  }
}

int unisono_rank(const unisono_comm* comm) {
  int rank = -1;
  guarded([&] { rank = given(comm, "comm").communicator.rank(); });
  return rank;
}

int unisono_size(const unisono_comm* comm) {
  int size = -1;
  guarded([&] { size = given(comm, "comm").communicator.size(); });
  return size;
}

int unisono_synchronize(unisono_comm* comm, void* stream) {
  return guarded([&] { given(comm, "comm").communicator.synchronize(stream); });
}

int unisono_failure(unisono_comm* comm) {
  return guarded([&] { given(comm, "comm").communicator.raise_if_failed(); });
}

int unisono_abort(unisono_comm* comm, const char* why) {
  return guarded([&] { given(comm, "comm").communicator.abort(why ? why : ""); });
}

int unisono_close(unisono_comm* comm) {
  return guarded([&] { given(comm, "comm").communicator.close(); });
}

void unisono_free(unisono_comm* comm) { delete comm; }
