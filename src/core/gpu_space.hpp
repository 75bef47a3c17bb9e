// A space on a GPU, as a transport on the GPU's streams needs it.
#pragma once

#include <memory>

#include "core/space.hpp"

namespace unisono::nodes {

class GpuSpace : public Space {
 public:
  // A point in a stream. Any thread may ask for it.
  class Mark {
   public:
    virtual ~Mark() = default;
    virtual bool reached() const = 0;
  };

  // Begins a call on a stream and makes the GPU the thread's current one. Order: the stream waits for the
  // call before, whose scratch this one takes. Whoever launches a graph orders the calls that it has
  // captured.
  virtual void begin(void* stream) = 0;
  // Ends the call, whether it has succeeded or not.
  virtual void end() noexcept = 0;

  // Returns whether a graph captures the call.
  virtual bool captured() const = 0;
  // Returns the point behind all that the call has enqueued so far. Requires: no graph captures the call.
  virtual std::unique_ptr<Mark> mark() = 0;

  // Returns whether all that a stream was given is done.
  virtual bool idle(void* stream) const = 0;
  // Makes the GPU the calling thread's current one while the result lives, for a thread beside the calls: its
  // queries end no other thread's capture.
  virtual std::shared_ptr<void> enter_thread() const = 0;

 protected:
  GpuSpace() = default;
};

}  // namespace unisono::nodes
