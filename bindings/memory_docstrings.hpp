// The docstrings of symmetric and registered memory, which the type stubs carry too.
#pragma once

namespace unisono::python::doc {

constexpr const char* kEmpty =
    R"(Returns an array in symmetric memory: calls on it need no copy (algorithm direct). Collective.

The contents are not initialised. The array may be used, and dropped, like any other. GPU memory that was dropped is
freed by the next `empty`, or with the communicator. Across nodes the ranks of a node reach each other's memory.

Args:
    shape: the same on every rank.
    dtype: the same on every rank: a numpy or torch dtype, or a name such as "bf16".
    device: cpu: a numpy array. cuda: memory of this rank's GPU, as a torch tensor if torch has been imported, else a cupy
        array if cupy has, else an object with __dlpack__. None: cuda if the communicator has a GPU.

Raises:
    ResourceError: one of the ranks has no memory for it; raised on every rank.

On a GPU, either every rank passes the same offset of the same allocation, and the call needs no copy, or every rank
passes another array. Ranks that differ wait for each other until the deadline (check=True reports them). Every rank
passes out to reduce and gather, and x to broadcast and scatter, so that all know the root's. The outputs of recv,
send_recv, all_to_all_v and batch_send_recv may lie anywhere.)";

constexpr const char* kRegister =
    R"(Makes an array of the user's known to every rank, so that calls on it, and on views within it, run as on
memory of `empty`, without a copy. Collective.

Args:
    x: as many bytes on every rank, of any dtype and shape that calls take; on every rank on the CPU, or on every rank on
        its GPU. It may be read-only, as an input of calls. It is kept alive while it is registered.

Returns:
    the Registration. It lasts until its `close`, or as long as the communicator, also if the object is dropped.

Raises:
    UsageError or ResourceError, on every rank: x is wrong on one of them (no array, not contiguous, of another length,
        on another GPU, of `empty`, or overlapping a registered array), or its memory cannot be shared. Nothing is
        registered then, and the communicator goes on.

What it changes:

- GPU: x is symmetric memory, as of `empty`: a call uses it without a copy if every rank gives the same offset of the same
  registration. On every rank it lies in memory of cudaMalloc, as torch's and cupy's tensors do by default. CUDA does not
  share managed memory, memory of pools (cudaMallocAsync), or torch's expandable segments. If the GPUs cannot reach each
  other's memory, nothing changes.
- fabric: the NICs have x registered: all_to_all, all_gather and gather write straight into it, as into memory of `empty`.
- host: nothing, except for these checks. Ranks reach each other's arrays if they are threads, or if the kernel lets
  processes copy from each other; registered or not. If it does not, only memory of `empty` is direct.
- Across nodes: the above, within each node.

Do not free or move the memory while it is registered (tensor.resize_, tensor.set_). Register and close outside of the
capture of a CUDA graph, and close after the last replay of a graph that has captured calls on x. One process that drives
several GPUs registers on all at once: `comms.each(lambda c: c.register(x[c.rank]))`.)";

constexpr const char* kRegistration =
    R"(An array that all ranks know: see Communicator.register.

As a context manager it closes at the end of the block. After an exception it stays, since the other ranks may not come,
and ends with the communicator.)";

constexpr const char* kCloseRegistration =
    R"(Ends the registration. Collective, and idempotent.

When it returns, no rank reaches the array any more. On a GPU it waits for what is enqueued. Ranks close registrations in
the same order. On a closed communicator it ends the registration on this rank alone.

Raises:
    as every call. If the communicator has failed, the registration ends on this rank; a peer that still runs may reach
    the memory until it has left.)";

}  // namespace unisono::python::doc
