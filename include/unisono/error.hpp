// One hierarchy of errors; Python has the same classes. Every message is a sentence that says what to do.
#pragma once

#include <stdexcept>

#include "unisono/version.hpp"

namespace unisono {

class UNISONO_API Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The call is wrong by itself: shape, dtype, root, overlap, a failed or closed communicator. Nothing has
// moved.
class UNISONO_API UsageError : public Error {
  using Error::Error;
};

// The ranks' calls disagree (collective, dtype, op, count, root). Every rank raises it; the communicator is
// failed.
class UNISONO_API MismatchError : public Error {
  using Error::Error;
};

// A wait has passed the deadline (Options::timeout_s). The communicator is failed on every rank.
class UNISONO_API TimeoutError : public Error {
  using Error::Error;
};

// A rank has died or has closed its communicator while others wait for it. The communicator is failed.
class UNISONO_API PeerLostError : public Error {
  using Error::Error;
};

// The system has refused memory, a file or a handle. If that is a peer's buffer in the middle of a call, the
// communicator is failed.
class UNISONO_API ResourceError : public Error {
  using Error::Error;
};

}  // namespace unisono
