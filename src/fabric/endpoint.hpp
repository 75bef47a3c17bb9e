// The fabric lane: one rank, whose peers it reaches by remote writes only.
//
// A rank's scratch, registered once, has notes, which go with signals, and a ring of chunks from each peer.
// Buffers of `Communicator::empty` are regions of their own, which direct programs write to. Every write
// carries an immediate. Nothing here relies on the order in which writes arrive.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "fabric/channel.hpp"
#include "fabric/immediate.hpp"
#include "fabric/memory.hpp"
#include "host/far.hpp"
#include "host/move.hpp"
#include "lane/lane.hpp"
#include "unisono/communicator.hpp"

namespace unisono {

class FabricEndpoint {
 public:
  static constexpr std::uint32_t kChunks = 8;  // chunks in the ring of a pair
  static constexpr std::size_t kLeastChunk = 1024;
  static constexpr bool kPulls = false;
  static constexpr bool kMulticasts = false;
  static constexpr bool kLinked = false;

  struct Settings {
    fabric::Provider provider;
    int channels = 1;
    ChannelPolicy policy = ChannelPolicy::round_robin;
    std::size_t chunk_bytes = 0;
    std::size_t least_share = 1;  // of a transfer that `multi` splits, for one channel
    std::size_t completions = 0;  // of a channel's queue; 0: by the NIC
    std::chrono::duration<double> timeout{30};
  };
  // Functions that a wait calls while it lasts or when it meets a problem, and ends by their exceptions.
  struct Watch {
    std::function<void(int peer, double elapsed_s, const std::function<bool()>& arrived)> look;
    std::function<void(int peer)> late;  // the wait has lasted Settings::timeout
    // A write, or a queue (Port::kQueue), failed.
    std::function<void(int peer, const std::string& why)> broken;
    // A peer has no memory where a write should go.
    std::function<void(int peer, const std::string& why)> unreachable;
    std::function<void(const fabric::Immediate& word, const char* why)> refused;
  };

  FabricEndpoint(int rank, int ranks, const Settings& settings, Watch watch);
  ~FabricEndpoint();

  // For the bootstrap: what peers need to reach this rank. `connect` takes all contacts, in rank order.
  // crowded: this machine has fewer cores than ranks.
  struct Contact {
    std::vector<std::string> addresses;  // of the channels
    fabric::Announcement scratch;
  };
  Contact contact() const;
  void connect(std::vector<Contact> contacts, bool crowded);

  // Keeps endpoints and memory until the last rank of the group `name` in this process is destroyed. Ranks of
  // one process write into each other's without looking (provider shm).
  void keep_until_last(const std::string& name);

  // Sets the reduction of moves with several sources. sources_stay: sources stay as they are until `finish`
  // returns (input and output do not overlap), so that they need not be copied first.
  void prepare(host::Reduce reduce, bool sources_stay) {
    reduce_ = reduce;
    sources_stay_ = sources_stay;
  }

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }
  static constexpr int worker() { return 0; }
  static constexpr int workers() { return 1; }
  std::size_t chunk_bytes() const { return settings_.chunk_bytes; }
  void set_timeout(double timeout_s) { settings_.timeout = std::chrono::duration<double>(timeout_s); }
  static constexpr std::size_t piece_bytes() { return std::size_t{1} << 62; }
  static constexpr std::size_t tile_bytes() { return std::size_t{1} << 62; }

  // A destination may be far (host/far.hpp): a place of a peer's region, which is written from a single
  // source.
  // The write is complete for the peer after its wait for the next signal, and here after `finish`.
  void move(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs, std::size_t bytes);

  void signal(int peer, Slot slot);
  void wait(int peer, Slot slot);

  // Pieces, for RingChannel. piece_comes: whether the next piece from the peer has come, at least in part.
  std::uint64_t pieces_given(int peer) const { return of(peer).pieces_given; }
  std::uint64_t pieces_taken(int peer) const { return of(peer).pieces_taken; }
  std::uint64_t credits(int peer) const { return of(peer).has(fabric::Kind::credit).count(); }
  bool piece_comes(int peer) const {
    const std::uint64_t first = of(peer).parts_taken;
    return of(peer).has(fabric::Kind::piece).has(first, first + 1);
  }
  bool must_stage(const byte* from, std::size_t bytes) const;
  byte* outbox(int peer, std::uint64_t piece);
  void give_piece(int peer, const byte* from, std::size_t bytes);
  const byte* take_piece(int peer, std::size_t bytes);

  // Returns when all writes are complete here, so that their sources may be overwritten.
  void finish();

  // Makes progress until ready() is true. peer: the rank that the wait depends on, which may be this one.
  void await(int peer, const std::function<bool()>& ready);

  // Regions that peers may write to. Each rank numbers its own, from 1, and gives numbers out again.
  void enroll(fabric::Region& region, const cuda::Dmabuf& dmabuf = {}) const;  // registers it
  std::uint32_t free_number() const;
  void add_region(std::shared_ptr<fabric::Region> region);  // it gets that number
  // Takes a peer's region, in place of an older one. Returns false for a number that it cannot have.
  bool learn_region(int peer, std::uint32_t number, const fabric::Announcement& announced);
  void forget_released();
  // Returns the number of the region that a buffer of this rank lies in, and the offset; number 0: in none.
  std::pair<std::uint32_t, std::uint64_t> find(const byte* at, std::size_t bytes) const;
  // Returns a far address of `offset` in a peer's region. Returns null if the peer has no region of that
  // number, or if the region ends before `bytes`.
  byte* reach(int peer, std::uint32_t number, std::uint64_t offset, std::size_t bytes) const;

  // A message from memory of one rank straight to memory of another, beside the regions. It stays until the
  // writes are complete, also if nobody waits for them any more.
  struct Parcel {
    fabric::Region memory;             // this rank's end
    fabric::Announcement to;           // the receiver's end, for the sender
    fabric::Batch written;             // of the sender
    std::uint64_t first = 0, end = 0;  // numbers of the writes, for the receiver
  };
  // Both ranks begin the parcels between them in the same order. Requires: the endpoint has no calls that
  // write to regions.
  void give(int peer, Parcel& parcel);
  void expect(int peer, Parcel& parcel);
  bool has_come(int peer, const Parcel& parcel) const {
    return of(peer).has(fabric::Kind::bulk).has(parcel.first, parcel.end);
  }

  bool needs_local_registration() const { return channels_.front()->needs_local_registration(); }
  std::size_t most_bytes() const { return most_bytes_; }             // of one write
  std::size_t least_share() const { return settings_.least_share; }  // of a transfer, for one channel
  int channels() const { return static_cast<int>(channels_.size()); }
  const fi_info& nic(int channel) const { return channels_[static_cast<std::size_t>(channel)]->nic(); }
  const fabric::Calls& calls() const { return calls_; }

  // Words to peers that need no answer, by best effort.
  void tell(int peer, fabric::Kind kind);
  void tell_failure(const std::string& text, const std::function<bool(int peer)>& lives);
  std::string failure_of(int peer) const;
  bool told(int peer, fabric::Kind kind) const { return of(peer).has(kind).count() > 0; }
  void bury(int peer) const noexcept {  // Channel::bury
    for (const auto& channel : channels_) channel->bury(peer);
  }
  // Returns whether all writes of this rank to that peer are complete.
  bool quiet(int peer) const { return of(peer).in_flight.done(); }

  // Handles completions, arrivals and queued writes. Returns whether there were any.
  bool progress();
  // Gives up all writes that are still to be queued.
  void abandon() noexcept;

  // Arrays of size() pointers, for the next move.
  const byte** sources() { return sources_.data(); }
  Dst* destinations() { return destinations_.data(); }

  static constexpr std::size_t kFailureBytes = 1024;

 private:
  static constexpr std::size_t kScratch = 0;  // number of the scratch among the regions

  struct Peer {
    std::vector<fabric::Announcement> regions;
    fabric::Arrivals arrived[fabric::kKinds];
    std::uint64_t sent[fabric::kKinds] = {};  // writes to it
    std::uint64_t met = 0;                    // meetings waited for
    std::uint64_t pieces_given = 0, pieces_taken = 0, parts_taken = 0;
    std::uint64_t parcels_expected = 0;  // writes
    fabric::Batch in_flight;
    const fabric::Arrivals& has(fabric::Kind kind) const { return arrived[static_cast<int>(kind)]; }
    std::uint64_t& number(fabric::Kind kind) { return sent[static_cast<int>(kind)]; }
  };
  struct Layout;
  Layout layout() const;

  Peer& of(int peer) { return peers_[static_cast<std::size_t>(peer)]; }
  const Peer& of(int peer) const { return peers_[static_cast<std::size_t>(peer)]; }

  // The writes of a transfer to a peer: their number, and each of them.
  struct Part {
    int channel;
    std::size_t begin, bytes;
  };
  std::size_t shares(std::size_t bytes) const;
  std::size_t parts(std::size_t bytes) const;
  Part part(int peer, std::size_t bytes, std::size_t index) const;
  int usual_channel(int peer) const;

  fabric::Write write_to(int peer, const fabric::Announcement& its, std::uint64_t offset, std::size_t bytes,
                         int channel, fabric::Kind kind, std::uint64_t number) const;
  fabric::Task transfer(int peer, const byte* from, std::size_t bytes, std::size_t region,
                        std::uint64_t offset, fabric::Kind kind, Parcel* parcel = nullptr);
  void start(fabric::Task task);
  void put_far(const Dst& to, const byte* from, std::size_t bytes);
  void* descriptor(const byte* from, std::size_t bytes, int channel) const;
  void accept(std::uint32_t word);
  void note(int peer, fabric::Kind kind, std::uint64_t value);

  int rank_;
  Settings settings_;
  Watch watch_;
  std::size_t most_bytes_;
  const host::Kernels& kernels_;
  host::Reduce reduce_ = nullptr;
  bool sources_stay_ = false;
  std::chrono::microseconds yielding_{};  // how long an idle wait yields before it sleeps
  std::vector<Peer> peers_;
  fabric::Calls calls_;
  // A rank's objects in libfabric. Registrations end before the channels that they are made with. Memory ends
  // after the channels: a provider's thread may use memory as long as there is an endpoint.
  struct Estate {
    std::vector<std::shared_ptr<fabric::Region>> regions;  // 0: the scratch
    std::vector<std::unique_ptr<fabric::Port>> ports;
    std::vector<std::unique_ptr<fabric::Channel>> channels;
    Estate() = default;
    Estate(Estate&&) = default;
    Estate& operator=(Estate&&) = default;
    ~Estate() {
      for (const auto& region : regions)
        if (region) region->registrations.clear();
    }
  };
  struct House;
  std::shared_ptr<House> house_;
  Estate estate_;
  std::vector<std::unique_ptr<fabric::Channel>>& channels_ = estate_.channels;
  std::vector<std::shared_ptr<fabric::Region>>& regions_ = estate_.regions;
  std::vector<fabric::Task> tasks_;      // those that still write
  std::vector<fabric::Task> abandoned_;  // kept to the end: a task whose failure abandons it still runs
  std::vector<const byte*> sources_;
  std::vector<Dst> destinations_;
};

}  // namespace unisono
