// The docstrings of Communicator, which the type stubs carry too.
#pragma once

namespace unisono::python::doc {

constexpr const char* kCommunicator =
    R"(The ranks that communicate. Made by unisono.init() or unisono.init_threads().

Arrays are C-contiguous numpy or cupy arrays, torch tensors, or what speaks DLPack, of dtype f32, f64, f16, bf16, i8, u8, i32, i64, f8e4m3 or
f8e5m2 (ml_dtypes names the last), used without a copy. Calls are made by one thread at a time, in the same order on
every rank; each returns the output once it is complete. Calls on arrays of the communicator's GPU only enqueue on
`stream` (None: the current one of torch or cupy), and may be captured in a CUDA graph.

Sums: every element is combined once, in rank order, in f32 (f64 for f64), and rounded once at the end, so that every
algorithm gives the same bits on every rank. Integers wrap. avg is the sum divided by the number of ranks (integers:
the exact 64-bit sum, truncated toward zero). min and max give NaN where any operand is NaN, and of equal values the
earlier rank's. f8e4m3 overflows to NaN, the other floats to infinity.

Errors: UsageError for a call that is wrong by itself, before anything moves; MismatchError where the ranks' calls differ: with
check=True or UNISONO_CHECK=1 always, before anything moves; without, on the CPUs of one machine, where data of another
call comes (messages of a batch of another length are not noticed, nor two ranks that both take themselves for the root), and
elsewhere such calls may give wrong results, or wait for the deadline; TimeoutError past the deadline; PeerLostError for a rank that died;
ResourceError for memory, a file or a handle that the system refuses. After a mismatch, a deadline or a lost rank, and where a
peer's buffer cannot be reached, the communicator is failed on every rank, and every call raises the same error. Another exception in the middle
of a call, such as MemoryError or KeyboardInterrupt, closes it.)";

constexpr const char* kFabric =
    R"(The fabric lane, for unisono.init(lane=...): remote writes by libfabric, between machines or within one.

provider: a name of fabric_providers(); empty: UNISONO_FABRIC_PROVIDER, else libfabric's best between machines.
channels: endpoints, by turns on the NICs; None: UNISONO_FABRIC_CHANNELS, else one a NIC. policy: single (the first channel for all peers), multi (each
transfer split over all), round-robin (channel (peer + rank) mod channels). pinned: CUDA pins the host memory
of `empty`.

A communicator that also has device= takes GPU memory of `empty` in all_to_all, out of place: such a call waits for its
stream before and after, is complete when it returns, and is not for CUDA graphs. Where there is no GPU, or a provider
that takes its memory, ResourceError or UsageError says so.)";

constexpr const char* kFabricProviders =
    R"(What libfabric offers here that the fabric lane can use, best first.

Raises ResourceError, with the reason, where this build or this machine has no libfabric.)";

constexpr const char* kClose =
    R"(Leaves the communicator. Idempotent, and not collective: peers that still wait for this rank get a PeerLostError.)";

constexpr const char* kAllReduce =
    R"(Everyone gets the combination of everyone's x.

x: any shape. out: the same shape; None: a new array; x itself: in place. op: sum, prod, min, max, avg.
algorithm: one_shot_packets, one_shot (everyone combines everything), two_shot_packets, two_shot, two_shot_push,
two_shot_direct (each combines a shard: R. Rabenseifner, Optimization of Collective Reduction Operations, ICCS 2004), or
reduce_scatter_all_gather; on a GPU also one_shot_ll128, two_shot_ll128 (in lines of 128 bytes, over NVLink) and
copy_engine; None: the plan's choice. Communicator.algorithms() lists them. Returns out.

wire: fp8 or int8 sends a byte for each element and one for each block of 32, in place of the elements, and rounds: every
x, and the sum. Every rank still gets the same bits, those of every lane, NaNs aside. For sum and avg of f32, f16 and
bf16, by two_shot.
Blocks are 32 elements, from the first on. With x(r) rank r's element, y its exact sum, s
the sum of the rounded x(r), and A(r) and S the largest magnitudes of x(r) and s in the element's block:
  int8: |out - y| <= (sum of A(r) + S) / 127
  fp8:  |out - y| <= (sum of |x(r)| + |s|) / 16 + (sum of A(r) + S) / 2^17
(for avg, with x(r) and A(r) divided by the number of ranks), beside the rounding of f32 sums and of the result to its dtype; a
magnitude below 2^-127 may become zero. A block in which an infinity, a NaN or an overflow occurs is NaN throughout. One
rank alone gets x. The layout is that of MXFP8 and MXINT8 (OCP Microscaling Formats 1.0); two shots with a rounding before each
as in EQuARX (I. Ahmed et al., arXiv 2506.17615) and ZeRO++ (G. Wang et al., arXiv 2306.10209).)";

constexpr const char* kReduce =
    R"(The root gets the combination of everyone's x.

x: any shape. out: the same shape, at the root (elsewhere ignored; but on a GPU, where the root's is of `empty`, every
rank gives its own, at the same place: see `empty`); None: a new array; x itself: in place.
algorithm: push_packets, push, direct, two_shot_push (each but the root combines a shard); on a GPU also push_ll128,
two_shot_ll128 and, of two ranks, copy_engine. Returns out at the root, None elsewhere.)";

constexpr const char* kBroadcast =
    R"(Everyone gets the root's x.

x: any shape, the same on every rank. out None: x is overwritten on all but the root, and returned. Otherwise out, of the
same shape, is written on every rank, and x is read at the root only (but on a GPU, where the root's is of `empty`, every
rank gives its own, at the same place: see `empty`).
algorithm: push_packets, push, scatter_all_gather (R. van de Geijn, On Global Combine Operations, 1994), direct, chain
(each passes every piece on to the next); on a GPU also push_ll128, two_shot_ll128 and copy_engine.)";

constexpr const char* kAllGather =
    R"(Everyone gets everyone's x, in rank order.

x: any shape s. out: shape (size, *s); None: a new array. In place: x is out[rank]. Returns out.)";

constexpr const char* kGather =
    R"(The root gets everyone's x, in rank order.

x: any shape s. out: shape (size, *s) at the root (elsewhere ignored; but on a GPU, where the root's is of `empty`, every
rank gives its own, at the same place: see `empty`); None: a new array. In place: x is out[rank] at the root. Returns out
at the root, None elsewhere.)";

constexpr const char* kReduceScatter =
    R"(Rank r gets the combination of everyone's x[r].

x: shape (size, *s). out: shape s; None: a new array. In place: out is x[rank]. Returns out.)";

constexpr const char* kScatter =
    R"(Rank r gets the root's x[r].

x: shape (size, *s) at the root; elsewhere None (then out must be given) or an array of that shape, which is not read
(but on a GPU, where the root's is of `empty`, every rank gives its own, at the same place: see `empty`).
out: shape s; None: a new array. In place: out is x[rank] at the root. Returns out.)";

constexpr const char* kAllToAll =
    R"(out[p] on rank r becomes x[r] of rank p.

x: shape (size, *s). out: the same shape; None: a new array; x itself: in place. Returns out.)";

constexpr const char* kAllToAllV =
    R"(Rank r sends send_counts[p] elements to each rank p and gets recv_counts[p] from it.

x: 1-D, packed in rank order, as many elements as the send counts add up to. out: likewise by the receive counts; None: a
new array; x itself: in place, with equal send and receive counts. Returns out.)";

constexpr const char* kSend =
    R"(Sends x, of any shape, to rank `peer`, which calls recv or send_recv with as many elements.

It may return before that or wait for it: the size, the plan, the machine and the run decide. Ranks that send to each other must
use send_recv or batch_send_recv.)";

constexpr const char* kRecv = R"(Receives into out, of any shape, from rank `peer`. Returns out.)";

constexpr const char* kSendRecv =
    R"(Sends x to rank dst while it receives out, of the same shape and dtype, from rank src: rings and exchanges in which
every rank calls it cannot lock up. Against a rank that calls recv, then send, a large message of GPU memory may wait
for its deadline, and with check any.

out None: a new array. Returns out.)";

constexpr const char* kBatchSendRecv =
    R"(Several sends and receives at once, as one call: NCCL's group, torch.distributed's batch_isend_irecv.

sends: (x, rank) for each message that goes. recvs: (out, rank) for each that comes. Arrays of any shape and dtype, all on the CPU
or all on the GPU, apart from each other; at most one to each rank and one from each, this one included. Both ends of a message
call it, with as many bytes; ranks that have none need not.)";

constexpr const char* kEmpty =
    R"(An array in symmetric memory: calls on it need no copy (algorithm direct).

Collective: every rank calls it with the same shape and dtype (a numpy or torch dtype, or a name such as "bf16"). Not
initialised by contract. It may be used, and dropped, like any array; GPU memory that was dropped is freed by the next
`empty`, or with the communicator. Raises ResourceError on every rank when one of them has no memory for it.

device: cpu: a numpy array; cuda: memory of this rank's GPU, as a torch tensor where torch has been imported, else a
cupy array where cupy has, else an object with __dlpack__; None: cuda where the communicator has a GPU. A call on a GPU
takes such arrays without a copy: every rank gives the same offset of the same allocation, or every rank another array;
ranks that differ wait for each other until the deadline (check=True tells). So that the others know the root's, reduce
and gather take out, and broadcast and scatter x, on every rank. What recv, send_recv, all_to_all_v and batch_send_recv
receive into may lie anywhere.)";

constexpr const char* kSynchronize =
    R"(Waits until what is enqueued on the stream is done, and raises what went wrong there (see the errors above).

stream: a torch or cupy stream, or a handle; None: the legacy default stream. Calls on a GPU only enqueue: each raises
what an earlier one has met, and this one all of it.)";

constexpr const char* kPlan =
    R"(The algorithm that is taken for a call of `collective` whose larger buffer on any rank has `bytes`, with symmetric
buffers or plain ones, in place or not. Each message of a batch_send_recv, and on
GPUs of an all_to_all_v, goes by its own size: `bytes` are those of one message there, and here of equal ones together.)";

constexpr const char* kSetPlan =
    R"(Replaces the plan: a list of (collective, symmetric, up_to_bytes or None, algorithm) in rising order of bytes, the same on
every rank. An entry may end with how the kernel is cut on a GPU: (blocks, threads, bytes that a block takes up at
once), zeros for what pays. Collectives that it does not name keep their plan. `unisono tune` measures one. device: of calls on `cpu` or `cuda`
memory within a node, or of how `nodes` work together.)";

constexpr const char* kCard =
    R"(The name of the ranks' GPUs, by which plans are chosen; empty where they differ. Raises UsageError where there is no GPU.)";

}  // namespace unisono::python::doc
