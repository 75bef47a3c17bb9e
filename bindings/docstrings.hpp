// The docstrings of Communicator, which the type stubs carry too.
#pragma once

namespace unisono::python::doc {

constexpr const char* kCommunicator =
    R"(The ranks that communicate. Made by unisono.init(), init_threads() or init_all(); the same class everywhere.

Arrays are C-contiguous: numpy or cupy arrays, torch tensors, or objects with DLPack. They are used without a copy.
Dtypes: f32, f64, f16, bf16, i8, u8, i32, i64, f8e4m3, f8e5m2 (ml_dtypes names the last).

Order: calls come in the same order on every rank. Those of several threads run one at a time, in the order in which
they come; the threads see to it that this is the same order on every rank. Each call returns its output once it is
complete. A call on arrays of the communicator's GPU only enqueues on `stream`, and a CUDA graph may capture it.

Sums: every element is combined once, in rank order, in f32 (f64 for f64), and rounded once at the end. Every
algorithm therefore gives the same bits on every rank, on one node or several.

- Integers wrap. avg is the sum divided by the number of ranks; of integers the exact 64-bit sum, truncated toward
  zero.
- min and max give NaN if an operand is NaN, and of equal values the earlier rank's.
- band, bor and bxor combine the bits of integers. Arrays of floats, and arrays on a GPU, raise UsageError.
- f8e4m3 overflows to NaN, the other floats to infinity.
- factor makes a premultiplied sum: each element of this rank's x is multiplied in f32 (f64 for f64) and rounded to its
  dtype, and then summed. Any float; ranks may give different ones.

Every call takes these:

- algorithm: a name of Communicator.algorithms(); None: the plan's choice.
- stream: for arrays on a GPU, a torch or cupy stream, or a handle; None: the current one of torch or cupy.
- timeout_s: the deadline of this call's waits, in seconds; None: the communicator's. Not for arrays on a GPU.
- asynchronous: True returns a Work at once. A thread of the communicator runs the call, after all that came before.
  Leave its arrays alone until it has ended. A call on a GPU is enqueued as otherwise, and its Work is done.

Errors of every call:

- UsageError: the call is wrong by itself. Nothing has moved.
- MismatchError: the ranks' calls differ. With check=True or UNISONO_CHECK=1 it is raised before anything moves.
- TimeoutError: a wait has passed the deadline.
- PeerLostError: a rank has died, or has closed its communicator while others wait for it.
- ResourceError: the system refuses memory, a file or a handle.

Without check, ranks on the CPUs of one machine notice data of another call. They do not notice a batch's message of
another length, or two ranks that both act as the root. Between nodes MPI and gloo notice a message of another
length. Elsewhere such calls may give wrong results, or wait for the deadline.

After a mismatch, a deadline, a lost rank, or a peer's buffer that cannot be reached, the communicator is failed: every
call raises the same error on every rank. Another exception in the middle of a call, such as MemoryError or
KeyboardInterrupt, closes it.)";

constexpr const char* kWork =
    R"(A call that has begun: made by `asynchronous=True`. It goes on if this object is dropped. Communicator.close() ends
what has not ended, with a UsageError.)";

constexpr const char* kWait =
    R"(Waits until the call has ended. Returns what the call returns otherwise.

Args:
    timeout_s: seconds; None: no limit but the call's own deadlines.

Raises:
    TimeoutError: the call has not ended by then, and goes on (`done` is False); or a deadline of the call has passed.
    The errors of the call.)";

constexpr const char* kBind =
    R"(Binds calls to their arrays: `step = comm.bind.all_reduce(x, out=y)` reads the arguments once, and `step()` makes the
call. It has the methods of Communicator, without `asynchronous` and `timeout_s`, and each returns such a function.)";

constexpr const char* kStep =
    R"(Makes the bound call and returns its output, the same array each time; of a recv with a tag a new Received.

The arrays live as long as this function. It does not look at them: leave their size and place as they are. A call on GPU
memory is enqueued on the stream that the binding has found.

Raises:
    The errors of the call; UsageError if the communicator is closed.)";

constexpr const char* kFabric =
    R"(The fabric lane, for unisono.init(lane=...): remote writes by libfabric, between machines or within one.

Args:
    provider: a name of fabric_providers(); empty: UNISONO_FABRIC_PROVIDER, else libfabric's best between machines.
    channels: endpoints, by turns on the NICs; None: UNISONO_FABRIC_CHANNELS, else one a NIC.
    policy: single (the first channel for all peers), multi (each transfer split over all channels), or round-robin
        (channel (peer + rank) mod channels).
    pinned: whether CUDA pins the host memory of `empty`.

A communicator that also has device= takes GPU memory of `empty` in all_to_all, out of place. Such a call waits for its
stream before and after, is complete when it returns, and cannot be captured in a CUDA graph.

Raises:
    ResourceError or UsageError: there is no GPU, or no provider that takes its memory.)";

constexpr const char* kFabricProviders =
    R"(Returns what libfabric offers here that the fabric lane can use, best first.

Raises:
    ResourceError: this build or this machine has no libfabric; the text says why.)";

constexpr const char* kClose =
    R"(Leaves the communicator. Idempotent, and not collective: peers that still wait for this rank get a PeerLostError.)";

constexpr const char* kAllReduce =
    R"(Gives everyone the combination of everyone's x.

Args:
    x: any shape.
    op: sum, prod, min, max or avg; of integers, not on a GPU, also band, bor or bxor (of their bits).
    out: the shape of x; None: a new array; x itself: in place.
    algorithm: one_shot_packets or one_shot (everyone combines everything); two_shot_packets, two_shot, two_shot_push or
        two_shot_direct (each rank combines a shard); reduce_scatter_all_gather. On a GPU also one_shot_ll128 and
        two_shot_ll128 (lines of 128 bytes, over NVLink) and copy_engine. Across nodes one_shot, two_shot or chain
        (partial sums travel from node to node). None: the plan's choice.
    wire: fp8 or int8 sends a byte for each element and one for each block of 32. Every x is rounded, and the sum. Only
        for sum and avg of f32, f16 and bf16, by two_shot. Every rank still gets the same bits, and, except NaNs, every
        lane gives the same.
    factor: scales this rank's x before the sum (see Sums), and before wire rounds it; 1: none. Only for sum of f32, f64,
        f16 and bf16, not on a GPU.

Returns:
    out.

Bounds of wire: blocks are 32 elements, from the first on. x(r) is rank r's element, y the exact sum, and s the sum of the
rounded x(r). A(r) and S are the largest magnitudes of x(r) and s in the element's block.
  int8: |out - y| <= (sum of A(r) + S) / 127
  fp8:  |out - y| <= (sum of |x(r)| + |s|) / 16 + (sum of A(r) + S) / 2^17
For avg, x(r) and A(r) are divided by the number of ranks. Beside these stand the rounding of f32 sums and of the result to
its dtype. A magnitude below 2^-127 may become zero. A block in which an infinity, a NaN or an overflow occurs is NaN
throughout. One rank alone gets x.

Sources: R. Rabenseifner, Optimization of Collective Reduction Operations, ICCS 2004 (two_shot). OCP Microscaling Formats
1.0 (the layout of MXFP8 and MXINT8). I. Ahmed et al., EQuARX, arXiv 2506.17615, and G. Wang et al., ZeRO++, arXiv
2306.10209 (two shots with a rounding before each).)";

constexpr const char* kReduce =
    R"(Gives the root the combination of everyone's x.

Args:
    x: any shape.
    root: the rank that gets the result.
    op: sum, prod, min, max or avg; of integers, not on a GPU, also band, bor or bxor (of their bits).
    out: the shape of x, at the root; None: a new array; x itself: in place. Elsewhere ignored, except on a GPU if the
        root's is of `empty`: then every rank passes its own, at the same place (see `empty`).
    algorithm: push_packets, push, direct, or two_shot_push (each rank but the root combines a shard). On a GPU also
        push_ll128, two_shot_ll128 and, of two ranks, copy_engine. Across nodes one_shot, two_shot or chain.
    factor: scales this rank's x before the sum (see Sums); 1: none. Only for sum of f32, f64, f16 and bf16, not on a GPU.

Returns:
    out at the root, None elsewhere.)";

constexpr const char* kBroadcast =
    R"(Gives everyone the root's x.

Args:
    x: any shape, the same on every rank.
    root: the rank whose x is sent.
    out: None: x is overwritten on all ranks but the root, and returned. Otherwise an array of the same shape, which is
        written on every rank; x is then read at the root only. On a GPU, if the root's x is of `empty`, every rank
        passes its own, at the same place (see `empty`).
    algorithm: push_packets, push, scatter_all_gather, direct, or chain (each rank passes every piece on to the next). On a
        GPU also push_ll128, two_shot_ll128 and copy_engine.

Returns:
    out, else x.

Source: R. van de Geijn, On Global Combine Operations, 1994 (scatter_all_gather).)";

constexpr const char* kAllGather =
    R"(Gives everyone everyone's x, in rank order.

Args:
    x: any shape s. In place: x is out[rank].
    out: shape (size, *s); None: a new array.

Returns:
    out.)";

constexpr const char* kGather =
    R"(Gives the root everyone's x, in rank order.

Args:
    x: any shape s. In place: x is out[rank] at the root.
    root: the rank that gets the result.
    out: shape (size, *s), at the root; None: a new array. Elsewhere ignored, except on a GPU if the root's is of `empty`:
        then every rank passes its own, at the same place (see `empty`).

Returns:
    out at the root, None elsewhere.)";

constexpr const char* kReduceScatter =
    R"(Gives rank r the combination of everyone's x[r].

Args:
    x: shape (size, *s).
    op: sum, prod, min, max or avg; of integers, not on a GPU, also band, bor or bxor (of their bits).
    out: shape s; None: a new array. In place: out is x[rank].
    factor: scales this rank's x before the sum (see Sums); 1: none. Only for sum of f32, f64, f16 and bf16, not on a GPU.

Returns:
    out.)";

constexpr const char* kScatter =
    R"(Gives rank r the root's x[r].

Args:
    x: shape (size, *s) at the root. Elsewhere None (out is then required), or an array of that shape, which is not read.
        On a GPU, if the root's is of `empty`, every rank passes its own, at the same place (see `empty`).
    root: the rank whose x is sent.
    out: shape s; None: a new array. In place: out is x[rank] at the root.

Returns:
    out.)";

constexpr const char* kAllToAll =
    R"(Makes out[p] on rank r the x[r] of rank p.

Args:
    x: shape (size, *s).
    out: the same shape; None: a new array; x itself: in place.

Returns:
    out.)";

constexpr const char* kAllToAllV =
    R"(Sends send_counts[p] elements to each rank p, and receives recv_counts[p] elements from it.

Args:
    x: 1-D, packed in rank order, as many elements as the send counts add up to.
    send_counts: elements, one count for each rank.
    recv_counts: elements, one count for each rank. Both ends of a pair give the same count.
    out: 1-D, packed in rank order, by the receive counts; None: a new array; x itself: in place, with equal send and
        receive counts.

Returns:
    out.)";

constexpr const char* kSplit =
    R"(Makes a communicator of the ranks that give the same color. Collective.

The new one has the options of this one, and may outlive it.

Args:
    color: a number from 0; below 0: this rank is in none.
    key: ranks come in the order of their keys, then of their numbers here.

Returns:
    The Communicator; None for a color below 0.)";

constexpr const char* kReceived =
    R"(What a recv with a tag has taken. After asynchronous=True it is filled in when the Work has ended.)";

constexpr const char* kSend =
    R"(Sends x to rank `peer`, which calls recv or send_recv with as many elements.

The call may return before the peer's call, or wait for it: size, plan, machine and run decide. Ranks that send to each other
must use send_recv or batch_send_recv.

A message with a tag passes by all other calls, and any number may be under way. Both ranks are on one machine, or on several
that MPI, gloo or the fabric joins, and x is in host memory. A small one is sent at once, a larger one when its recv has come.

Args:
    x: any shape.
    peer: the rank that receives.
    tag: a number from 0; None: the message takes its turn among the calls.)";

constexpr const char* kRecv =
    R"(Receives into out from rank `peer`, which calls send or send_recv with as many elements.

With a tag, takes the first message of that tag from the peer that no recv before has taken. The message may be shorter than
out. A longer one is a MismatchError, and fails the communicator.

Args:
    out: any shape.
    peer: the rank that sends. With a tag also ANY_SOURCE.
    tag: as the sender's; None: the message takes its turn among the calls.

Returns:
    out; with a tag a Received, which has out, the sender and the bytes.)";

constexpr const char* kSendRecv =
    R"(Sends x to rank dst while it receives out from rank src.

Rings and exchanges in which every rank calls it cannot lock up. Against a rank that calls recv, then send, a large
message of GPU memory may wait for its deadline, and with check any message.

Args:
    x: any shape.
    dst: the rank that gets x.
    out: the shape and dtype of x; None: a new array.
    src: the rank that out comes from.

Returns:
    out.)";

constexpr const char* kBatchSendRecv =
    R"(Makes several sends and receives as one call, as NCCL's group and torch.distributed's batch_isend_irecv do.

Both ends of a message call it, with as many bytes. Ranks that have no message need not.

Args:
    sends: (x, rank) for each message that goes.
    recvs: (out, rank) for each message that comes.

Arrays have any shape and dtype, lie all on the CPU or all on the GPU, and do not overlap. At most one message goes to each
rank and one comes from each, this rank included.)";

constexpr const char* kSynchronize =
    R"(Waits until all work on the stream is done, and raises its failures.

Calls on a GPU only enqueue. Each raises the failure of an earlier one, and this one raises all of them.

Args:
    stream: a torch or cupy stream, or a handle; None: the legacy default stream.)";

constexpr const char* kPlan =
    R"(Returns the algorithm that an automatic call takes.

Args:
    collective: its name.
    bytes: of the larger buffer of the call, on any rank. Each message of a batch_send_recv goes by its own size: `bytes`
        are those of one message. On GPUs so does each message of an all_to_all_v: `bytes` are those of equal messages
        together.
    symmetric: whether every buffer is of `empty`.
    device: cpu or cuda, where the arrays lie; None: cuda if the communicator has a GPU.
    in_place: whether the output is the input.
    wire: fp8 or int8, of an all_reduce that quantises.)";

constexpr const char* kSetPlan =
    R"(Replaces rows of the plan. Every rank makes the same change, between the same calls.

Args:
    entries: (collective, symmetric, up_to_bytes or None, algorithm), in rising order of bytes. An entry may end with how a
        GPU's kernel is cut: (blocks, threads, bytes of a piece); for a zero, Unisono chooses. Collectives without an
        entry keep their plan. `unisono tune` measures such a list.
    device: cpu or cuda: of calls on that memory within a node; nodes: of how nodes work together.)";

constexpr const char* kCard =
    R"(Returns the name of the ranks' GPUs, by which plans are chosen; empty if they differ.

Raises:
    UsageError: the communicator has no GPU.)";

}  // namespace unisono::python::doc
