// libfabric, opened when it is first used: a program that never asks for the fabric lane needs none, and one
// that runs MPI keeps the libfabric of its MPI.
#pragma once

#include <rdma/fabric.h>

#include <string>

namespace unisono::fabric {

// The functions that libfabric exports; all others go through the objects that these make.
struct Library {
  decltype(&::fi_getinfo) getinfo;
  decltype(&::fi_freeinfo) freeinfo;
  decltype(&::fi_dupinfo) dupinfo;
  decltype(&::fi_fabric) fabric;
  decltype(&::fi_strerror) strerror;
  decltype(&::fi_version) version;

  std::string version_text() const;
};

// Throws ResourceError, which says what to install, where there is none.
const Library& library();

// Throws ResourceError with libfabric's text when `result` is negative; returns it otherwise.
long checked(long result, const std::string& what);
std::string error_text(long code);

}  // namespace unisono::fabric
