// libfabric, opened at its first use. A program without the fabric lane needs no libfabric. A program that
// runs MPI keeps the libfabric of its MPI.
#pragma once

#include <rdma/fabric.h>

#include <string>

namespace unisono::fabric {

// The functions that libfabric exports. All others go through the objects that these make.
struct Library {
  decltype(&::fi_getinfo) getinfo;
  decltype(&::fi_freeinfo) freeinfo;
  decltype(&::fi_dupinfo) dupinfo;
  decltype(&::fi_fabric) fabric;
  decltype(&::fi_strerror) strerror;
  decltype(&::fi_version) version;

  std::string version_text() const;
};

// Returns the library, opened. Throws ResourceError, which says what to install, if there is none.
const Library& library();

// Returns `result`. Throws ResourceError with libfabric's text if `result` is negative.
long checked(long result, const std::string& what);
std::string error_text(long code);

}  // namespace unisono::fabric
