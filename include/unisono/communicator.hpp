// The ranks that communicate, and what they can do together.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "unisono/bootstrap.hpp"
#include "unisono/buffer.hpp"
#include "unisono/error.hpp"
#include "unisono/registration.hpp"
#include "unisono/transport.hpp"
#include "unisono/types.hpp"
#include "unisono/version.hpp"
#include "unisono/work.hpp"

namespace unisono {

// One rank's part of a collective. Elements are combined in rank order in a wide type, so that every
// algorithm gives the same bits (DESIGN.md, "Sums"). Buffers may be anywhere; those of `Communicator::empty`,
// and within registered memory, are used without a copy.
struct Call {
  const void* in = nullptr;
  void* out = nullptr;
  // Elements of the buffer (all_reduce, reduce, broadcast, send, recv, send_recv); else of one rank's block.
  std::size_t count = 0;
  DType dtype = DType::f32;
  Op op = Op::sum;
  int root = 0;
  Memory memory = Memory::host;  // of `in` and `out`
  // Device memory: the cudaStream_t that the call is enqueued on. The next call that no graph captures may
  // wait for this stream, which must live until then.
  void* stream = nullptr;
  std::string_view algorithm{};  // empty: the plan's choice; else one of `algorithms(collective)`
  // all_reduce only, sum and avg of f32, f16 and bf16. Except with exact, every input and the sum are rounded
  // to the format. Every rank gets the same bits. int8: a rounding is off by at most 1/127 of the largest
  // magnitude of the element's block. fp8: by 1/16 of the element's magnitude and 2^-17 of that largest one.
  // Either: by 2^-127 at least. Blocks are 32 elements, from the buffer's begin. A block in which an
  // infinity, a NaN or an overflow occurs becomes NaN.
  Wire wire = Wire::exact;
  double timeout_s = 0;  // deadline of this call's waits, on host memory; 0: the communicator's
  // Premultiplied sum: this rank's input is scaled before the sum, as NCCL's ncclRedOpCreatePreMulSum does.
  // all_reduce, reduce and reduce_scatter, Op::sum of f32, f64, f16 and bf16 in host memory. Each element is
  // multiplied in f32 (f64: in f64) and rounded to its dtype. Any double; 1: none. Ranks may differ in it.
  double factor = 1;
};

// The ranks that communicate, on one node or several.
//
// Order: calls come in the same order on every rank. Calls of several threads run one at a time, in the order
// in which they come; the threads see to it that this is the same order on every rank.
//
// A call returns when this rank's output is complete and its input may be overwritten. A call on device
// memory only enqueues that on its stream, and a CUDA graph may capture it. On the fabric lane such a call
// waits for the stream before and after, and is complete when it returns.
//
// Throws: the errors of error.hpp. The next call, or `synchronize`, throws what goes wrong on a GPU later.
// Any other exception in the middle of a call, such as std::bad_alloc, closes the communicator: this rank is
// out of step with its peers.
//
// Device memory of `empty`, or registered, is used without a copy if every rank gives the same offset of the
// same allocation or registration (as NCCL's windows and NVSHMEM ask), the root's buffer included, or if
// every rank gives other memory.
class UNISONO_API Communicator {
 public:
  // The lane on libfabric: between machines, or by one machine's NICs and shared memory.
  struct Fabric {
    std::string provider{};  // as `fabric_providers` names it; empty: UNISONO_FABRIC_PROVIDER, else the best
    std::optional<int> channels{};  // endpoints; default: UNISONO_FABRIC_CHANNELS, else one a NIC
    ChannelPolicy policy = ChannelPolicy::round_robin;
    bool pinned = false;  // host memory of `empty` is pinned by CUDA
  };
  struct Options {
    std::optional<double> timeout_s{};  // deadline of every wait, above 0; default UNISONO_TIMEOUT_S, else 30
    std::optional<int> device{};        // CUDA ordinal of this rank's GPU; all ranks have one, or none has
    int max_sms = 0;                    // that a kernel may take; 0: UNISONO_MAX_SMS, else as many as pay
    // False on any rank: no GPU touches another's memory (also UNISONO_PEER_ACCESS=0).
    bool peer_access = true;
    std::optional<bool> check{};  // compare the ranks' calls first; default UNISONO_CHECK, else no
    // Makes what carries messages between nodes. Called if the ranks are on several, on every rank. Without
    // it the fabric lane does (UNISONO_TRANSPORT=fabric).
    std::function<std::shared_ptr<Transport>()> transport{};
    std::string node{};  // the name of this rank's node; empty: UNISONO_NODE, else by the kernel's namespaces
    std::optional<Fabric> fabric{};  // the fabric lane instead of the host's; the same on every rank
    std::function<void()>
        while_waiting{};  // called every few ms of a long wait; what it throws ends the call and closes
    std::function<void()> before_rest{};  // called where `tells_before_rest` says; throws nothing
  };

  // Meets the other ranks. Collective over the bootstrap.
  // Throws UsageError if the ranks do not fit together (two with one number, different versions), if nothing
  // carries messages between their nodes, or if the program was compiled with the headers of another minor
  // version than the library that it has loaded. Throws ResourceError if memory cannot be shared.
  Communicator(const std::shared_ptr<Bootstrap>& bootstrap, const Options& options)
      : Communicator(kHeaderVersion, bootstrap, options) {}
  ~Communicator();
  Communicator(Communicator&&) noexcept;
  Communicator& operator=(Communicator&&) noexcept;

  int rank() const;
  int size() const;
  // Returns the ranks of each node, in rank order. Ranks of a node share memory.
  std::vector<std::vector<int>> nodes() const;
  // Returns the name of what carries messages between nodes. Empty: the ranks are on one node.
  std::string transport() const;
  // Returns whether a call on host memory, but for messages with tags, calls Options::before_rest in each
  // wait that has polled for long, before it gives its core away: if all ranks are on one machine's host
  // lane, without GPUs, and no other rank is in this process.
  bool tells_before_rest() const;

  void all_reduce(const Call& call);      // in, out: count. In place: out == in
  void reduce(const Call& call);          // in: count; out: count at the root. In place: out == in
  void broadcast(const Call& call);       // in: count at the root; out: count. In place: out == in
  void all_gather(const Call& call);      // in: count; out: size·count. In place: in == out + rank·count
  void gather(const Call& call);          // in: count; out: size·count at the root. In place as all_gather
  void reduce_scatter(const Call& call);  // in: size·count; out: count. In place: out == in + rank·count
  void scatter(const Call& call);     // in: size·count at the root; out: count. In place as reduce_scatter
  void all_to_all(const Call& call);  // in, out: size·count. In place: out == in

  // Sends `sends[r]` elements to rank r and receives `receives[r]` from it, packed in rank order. `count` is
  // not used.
  void all_to_all_v(const Call& call, std::span<const std::size_t> sends,
                    std::span<const std::size_t> receives);

  // Sends to one peer, or receives from one. A send may return before the receive, or wait for it: size,
  // plan, machine and run decide. Ranks that send to each other must use send_recv or batch_send_recv.
  void send(const Call& call, int to);
  void recv(const Call& call, int from);

  // Messages with tags, 0 or more, on host memory, between ranks of one machine or of several whose transport
  // has records (MPI, gloo and the fabric). They pass by all other calls, and do not take turns with them. A
  // receive takes the first message of its tag from that rank, or from any (kAnySource), that no receive
  // before has taken. Any number may be under way between two ranks. The receive's count is the most; a
  // longer message fails the communicator. A small message is sent at once, a larger one when its receive has
  // come. Messages without a tag are apart.
  static constexpr int kAnySource = -1;
  void send(const Call& call, int to, int tag);
  Received recv(const Call& call, int from, int tag);
  // Sends and receives at once, `count` elements each way, so that rings cannot lock up.
  void send_recv(const Call& call, int to, int from);
  // Makes several sends and receives at once: at most one to each rank and one from each, this rank included.
  // Both ends of a message call it; ranks without a message need not.
  // Requires: no `data` is null, also of an empty message. Of `call`, memory and stream are used.
  using Outgoing = unisono::Outgoing;
  using Incoming = unisono::Incoming;
  void batch_send_recv(const Call& call, std::span<const Outgoing> sends, std::span<const Incoming> receives);

  void barrier();

  // The same calls by their collective.
  void run(Collective collective, const Call& call = {});  // one that takes a Call alone, or barrier
  void run(Collective collective, const Call& call, int to, int from);               // send, recv, send_recv
  Received run(Collective collective, const Call& call, int to, int from, int tag);  // send, recv
  void run(const Call& call, std::span<const std::size_t> sends,
           std::span<const std::size_t> receives);  // all_to_all_v
  void run(const Call& call, std::span<const Outgoing> sends,
           std::span<const Incoming> receives);  // batch_send_recv

  // Begin such a call on host memory and return at once: a thread of the communicator runs it, after all that
  // came before. Later calls wait for their turn. The buffers stay as they are until the call has ended. A
  // call that is wrong by itself throws at once. On device memory it is only enqueued, and its Work is done.
  // A send or recv without a tag holds up this rank's later calls until it has ended. `close` and the
  // destructor end calls that have not, with a UsageError.
  Work begin(Collective collective, const Call& call = {});
  Work begin(Collective collective, const Call& call, int to, int from);
  Work begin(Collective collective, const Call& call, int to, int from, int tag);
  Work begin(const Call& call, std::span<const std::size_t> sends, std::span<const std::size_t> receives);
  Work begin(const Call& call, std::span<const Outgoing> sends, std::span<const Incoming> receives);

  // Makes a communicator of the ranks that give the same color, 0 or more, in the order of `key`, then of
  // their numbers here. Collective. Returns none for a color below 0. The new one has the options of this
  // one, plans apart, and may outlive it. Throws UsageError on the ranks of a color if they are on several
  // nodes and Options::transport carries messages, which is for all ranks: make their communicator by a
  // bootstrap of their own.
  std::optional<Communicator> split(int color, int key = 0);

  // Sets the deadline of the waits of later calls, above 0, in place of Options::timeout_s. Ranks may differ.
  // Any thread may call it, and it waits for no call. Calls that a CUDA graph has captured keep their
  // deadline, and so do a DeviceArea, a Moe or a Window on GPUs that has been made, and NCCL between nodes.
  void set_timeout(double timeout_s);

  // Returns memory that every rank of the node reaches, for calls without a copy. Collective.
  // Requires: every rank asks for the same number of bytes.
  Buffer empty(std::size_t bytes, Memory memory = Memory::host);

  // Makes memory of the user's known to every rank, so that calls on buffers within it run as on memory of
  // `empty`. Collective. The registration lasts until its `close`, or as long as the communicator.
  // Requires: every rank registers as many bytes. The memory stays where it is while it is registered, and
  // while a CUDA graph that has captured calls on it is in use. On a GPU it is of cudaMalloc.
  // Throws UsageError or ResourceError on every rank if one of them has a MemoryRange::problem, or memory
  // that cannot be shared or is registered already. Nothing is registered then, and nothing is lost.
  // On the host lane this only agrees on the memory: ranks reach the same buffers with it and without.
  Registration register_memory(const MemoryRange& range);

  std::optional<int> device() const;
  // Returns whether the ranks' GPUs reach each other's memory. If one pair cannot, or an option says so,
  // messages go through pinned host memory, and no algorithm reaches into peers' buffers. False without a
  // GPU.
  bool peer_access() const;
  // Returns whether they do so over NVLink, as the algorithms …_ll128 need, as far as the processes see each
  // other's GPUs (CUDA_VISIBLE_DEVICES).
  bool nvlink() const;
  // Returns the name of the ranks' GPUs, by which plans are chosen. Empty: the names differ.
  std::string_view card() const;
  // Waits until what is enqueued on the stream is done. Throws what went wrong there.
  void synchronize(void* stream);
  // Returns the stream of the last call on device memory that no graph has captured: see Call::stream.
  void* last_stream() const;

  // Throws the communicator's failure, also a rank's death that no call has met yet. From any thread.
  void raise_if_failed();

  // Returns, or sets from the next call on, whether the ranks' calls are compared first (Options::check).
  // Every rank sets it between the same calls.
  bool check() const;
  void set_check(bool check);

  // Fails the communicator on every rank of this node, whose calls then throw a PeerLostError with this
  // rank's number and `why`. Does not wait for them. Other nodes notice when these ranks close their
  // communicators. Does nothing if the communicator is closed or has failed. From any thread.
  void abort(const std::string& why);

  // Leaves the communicator: peers that still wait for this rank get a PeerLostError. Waits until calls that
  // have begun have ended, with their callbacks. Idempotent; not collective.
  void close() noexcept;
  bool closed() const;

  class Impl;

 private:
  friend class DeviceArea;
  friend class FusedNorm;
  friend class Moe;
  friend class Tuning;
  friend class Window;
  // Checks `header_version` before anything else: `options` may have another layout.
  Communicator(int header_version, const std::shared_ptr<Bootstrap>& bootstrap, const Options& options);
  std::unique_ptr<Impl> impl_;
};

// A provider of libfabric that the fabric lane can use.
struct FabricProvider {
  std::string name;
  int nics = 0, most_channels = 0;
  std::optional<double> line_gbps;  // Gbit/s of a NIC, where it says
  bool device_memory = false;       // it reads and writes GPU memory
};
// Returns the providers here, best first. Throws ResourceError, with the reason, if this build or this
// machine has no libfabric.
UNISONO_API std::vector<FabricProvider> fabric_providers();
// Returns the provider that a communicator takes for a name. Throws UsageError, which lists those present.
UNISONO_API FabricProvider fabric_provider(const std::string& name);
UNISONO_API std::string fabric_version();

// Makes a transport of the fabric lane: remote writes of libfabric, without an MPI. UNISONO_FABRIC_PROVIDER
// and UNISONO_FABRIC_CHANNELS name its provider and channels. Of the options, timeout_s is used. Collective.
// Throws ResourceError if this build or machine has no libfabric.
UNISONO_API std::shared_ptr<Transport> fabric_transport(Bootstrap& bootstrap,
                                                        const Communicator::Options& options);

// Returns the deadline of a wait, in seconds, if Options has none: UNISONO_TIMEOUT_S, else 30.
UNISONO_API double default_timeout_s();

// Returns how many GPUs CUDA sees; 0 without a driver, or without the CUDA lane in this build.
UNISONO_API int device_count();

// Returns the names that `Call::algorithm` may have for a collective. Across nodes they are those of
// Level::nodes.
UNISONO_API std::vector<std::string_view> algorithms(Collective collective, Level level = Level::host);

}  // namespace unisono
