// The docstrings of Window, which the type stubs carry too.
#pragma once

namespace unisono::python::doc {

constexpr const char* kWindowOf =
    R"(Makes a Window: memory of every rank's GPU that the others write to by copy engines. Collective.

Args:
    nbytes: of each rank's memory; the same on every rank.

Returns:
    the Window. It does not keep the communicator alive.

Raises:
    UsageError: the communicator has no GPUs, is on several nodes, or its GPUs are not joined by NVLink.
    ResourceError, on every rank: memory cannot be had.)";

constexpr const char* kWindow =
    R"(Memory of every rank's GPU, into which ranks put data with signals. Made by Communicator.window.

Copy engines move the data: it travels while a kernel, such as a matmul, has all SMs.

>>> window.begin()                                             # on the current stream, on every rank
>>> side.wait_stream(torch.cuda.current_stream())
>>> window.put_signal(x, peer, 0, stream=side)                 # beside what follows
>>> y = x @ weight
>>> window.wait_signals([peer], 1)
>>> z = window.array()[: x.nbytes].view(x.dtype).view_as(x) @ weight
>>> torch.cuda.current_stream().wait_stream(side)

All signals of a round are waited for before the next begin. Calls only enqueue, and a CUDA graph may capture whole
rounds. A wait that lasts longer than the communicator's timeout fails the communicator: its next call raises that.
`stream` is a torch or cupy stream or a handle; None: torch's current stream.)";

constexpr const char* kWindowArray =
    R"(Returns this rank's memory, which the Window keeps, as an array of bytes of the library that `empty` gives.)";

constexpr const char* kWindowBegin =
    R"(Begins a round: the stream goes on when every rank's has come here, and is done with the round before. Collective.

Raises:
    the errors of the communicator's calls.)";

constexpr const char* kPutSignal =
    R"(Copies an array into a peer's window, then counts one signal from this rank there.

Puts to one peer are made on streams that follow each other.

Args:
    x: on this rank's GPU, contiguous; may be empty: a signal alone.
    peer: another rank.
    offset: where in its window, in bytes.

Raises:
    UsageError: there is no such rank or place, or x cannot be taken.)";

constexpr const char* kWaitSignals =
    R"(Lets the stream wait until each of the peers has sent this rank `count` signals in this round.

Args:
    peers: other ranks.
    count: of signals since `begin`.

Raises:
    UsageError: there is no such rank.)";

}  // namespace unisono::python::doc
