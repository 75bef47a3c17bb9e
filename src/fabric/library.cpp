#include "fabric/library.hpp"

#include <dlfcn.h>

#include <csignal>

#include "base/env.hpp"
#include "fabric/communicator.hpp"
#include "unisono/error.hpp"

namespace unisono::fabric {
namespace {

// Opens one copy of libfabric in a process: two would share symbols, names and environment. A copy that is
// loaded already is MPI's (the mpich wheel's is newer than Debian's). Another one, if loaded before it, would
// keep MPI from starting.
void* open_library() {
  constexpr const char* kName = "libfabric.so.1";
  const std::string& named = env().libfabric;
  if (!named.empty()) return ::dlopen(named.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (void* there = ::dlopen(kName, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)) return there;
#ifdef UNISONO_LIBFABRIC
  if (void* found = ::dlopen(UNISONO_LIBFABRIC, RTLD_NOW | RTLD_LOCAL)) return found;
#endif
  return ::dlopen(kName, RTLD_NOW | RTLD_LOCAL);
}

// Restores the program's signal handlers. Debian's libfabric loads libraries (of PSM) that replace them:
// Ctrl-C would end Python at once, without an exception.
class KeptSignals {
 public:
  KeptSignals() {
    for (int number = 1; number < kSignals; ++number) ::sigaction(number, nullptr, &kept_[number]);
  }
  ~KeptSignals() {
    for (int number = 1; number < kSignals; ++number)
      if (number != SIGKILL && number != SIGSTOP) ::sigaction(number, &kept_[number], nullptr);
  }
  KeptSignals(const KeptSignals&) = delete;

 private:
  static constexpr int kSignals = 32;
  struct sigaction kept_[kSignals] = {};
};

template <class Function>
void find(void* from, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(from, name));
  if (!function)
    throw ResourceError("libfabric has no function " + std::string(name) +
                        ": install libfabric 1.17 or newer (Debian: libfabric1).");
}

Library open() {
  const KeptSignals kept;
  set_library_defaults();
  void* const from = open_library();
  if (!from)
    throw ResourceError("libfabric cannot be opened (" + std::string(::dlerror()) +
                        "): install it (Debian: libfabric1), or name the file in UNISONO_LIBFABRIC.");
  Library found{};
  find(from, "fi_getinfo", found.getinfo);
  find(from, "fi_freeinfo", found.freeinfo);
  find(from, "fi_dupinfo", found.dupinfo);
  find(from, "fi_fabric", found.fabric);
  find(from, "fi_strerror", found.strerror);
  find(from, "fi_version", found.version);
  if (FI_VERSION_LT(found.version(), FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION)))
    throw ResourceError("libfabric " + found.version_text() + " is older than the headers of this build (" +
                        std::to_string(FI_MAJOR_VERSION) + "." + std::to_string(FI_MINOR_VERSION) +
                        "): install a newer one, or build Unisono with its headers.");
  return found;
}

}  // namespace

void set_library_defaults() {
  // rxd sends 128 datagrams of up to 64 KiB before the first answer: a socket's buffer overflows, and some of
  // the dropped data never came.
  ::setenv("FI_OFI_RXD_MAX_UNACKED", "8", 0);
  // tcp (in 1.17 its name is net) calls a write complete that it has only put aside because the socket is
  // full. The rest leaves when libfabric is called again, which may never happen after a call's last word.
  ::setenv("FI_TCP_STAGING_SBUF_SIZE", "0", 0);
  ::setenv("FI_NET_STAGING_SBUF_SIZE", "0", 0);
}

const Library& library() {
  static const Library once = open();
  return once;
}

std::string Library::version_text() const {
  return std::to_string(FI_MAJOR(version())) + "." + std::to_string(FI_MINOR(version()));
}

std::string error_text(long code) { return library().strerror(static_cast<int>(code < 0 ? -code : code)); }

long checked(long result, const std::string& what) {
  if (result < 0) throw ResourceError(what + " failed: " + error_text(result) + ".");
  return result;
}

}  // namespace unisono::fabric
