#include "fabric/records.hpp"

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/bytes.hpp"
#include "base/deadline.hpp"
#include "base/failure.hpp"
#include "fabric/fabric_group.hpp"
#include "fabric/ring.hpp"
#include "fabric/settings.hpp"

namespace unisono::fabric {
namespace {

using Length = std::uint64_t;  // bytes of a record, before it in its piece

// Without a network a long message costs less than the copies of a record from here on.
constexpr std::size_t kMostOnOneMachine = std::size_t{16} << 10;

FabricEndpoint::Settings settings(int ranks, double timeout_s) {
  FabricEndpoint::Settings made = settings_of({.channels = 1}, ranks, false, timeout_s);
  made.chunk_bytes /= 2;
  if (made.provider.one_machine) made.chunk_bytes = std::min(made.chunk_bytes, kMostOnOneMachine);
  made.chunk_bytes = std::max(round_up(made.chunk_bytes, kAlign), FabricEndpoint::kLeastChunk);
  return made;
}

// Before a place for a long message in a piece, in place of a record's length. The receiver has registered
// the place, and the sender writes the message straight into it.
constexpr Length kPlaceFollows = ~Length{0};
struct Place {
  std::uint64_t address, bytes, key;
};

// A record is a piece in the ring of its pair, on endpoints that no call uses.
class RingRecords final : public Records {
 public:
  RingRecords(Bootstrap& bootstrap, double timeout_s)
      : group_(bootstrap,
               {.check = false, .lane = settings(bootstrap.size(), timeout_s), .while_waiting = {}}),
        peers_(static_cast<std::size_t>(bootstrap.size())) {}
  ~RingRecords() override {
    group_.leave();  // its last look completes writes of long messages
    if (!group_.inherited()) return;
    [[maybe_unused]] const auto* const of_the_parent = under_way_.release();  // its registrations
  }

  std::size_t most_bytes() const override { return most_ - kMostHead; }

  bool send(int to, std::span<const std::byte> head, std::span<const std::byte> data) override {
    return inside([&] {
      require(to);
      const Length length = head.size() + data.size();
      if (length > most_) throw TransportError(to, "a record of this rank is too long");
      RingChannel channel(lane_);
      if (!channel.has_room(to)) return false;
      byte* const at = channel.reserve(to, sizeof length + length).at;
      std::memcpy(at, &length, sizeof length);
      std::memcpy(at + sizeof length, head.data(), head.size());
      if (!data.empty()) std::memcpy(at + sizeof length + head.size(), data.data(), data.size());
      channel.commit(to, sizeof length + length);
      return true;
    });
  }

  // Counts records as under way until all writes to that rank are complete, or it has made room for more.
  std::size_t under_way(int to) override {
    return inside([&]() -> std::size_t {
      return lane_.quiet(to) ? 0 : lane_.pieces_given(to) - RingChannel(lane_).released(to);
    });
  }

  std::optional<int> take(std::vector<std::byte>& record) override {
    return inside([&]() -> std::optional<int> {
      lane_.progress();
      for (int i = 1; i <= lane_.size(); ++i) {
        const int peer = (last_ + i) % lane_.size();
        if (peer == lane_.rank()) continue;
        announce(peer);
        while (lane_.piece_comes(peer)) {
          RingChannel channel(lane_);
          const byte* const at = channel.arrived(peer, 1);  // of any length, a piece is one write
          Length length;
          std::memcpy(&length, at, sizeof length);
          if (length == kPlaceFollows) {
            std::memcpy(&of(peer).places.emplace_back(), at + sizeof length, sizeof(Place));
            channel.release(peer);
            give(peer);
            continue;
          }
          if (length > most_) throw TransportError(peer, "it has sent what is no record");
          record.resize(length);
          std::memcpy(record.data(), at + sizeof length, length);
          channel.release(peer);
          return last_ = peer;
        }
      }
      if (const auto now = Clock::now(); now - looked_ > kLook) {
        looked_ = now;
        group_.look();
      }
      return {};
    });
  }

  std::unique_ptr<Transport::Pending> send_long(const Outgoing& message) override {
    return inside([&]() -> std::unique_ptr<Transport::Pending> {
      const auto one = parcel(const_cast<void*>(message.data), message.bytes);
      if (lane_.needs_local_registration()) lane_.enroll(one->memory);
      of(message.to).sends.push_back(one);
      give(message.to);
      return std::make_unique<Long>(*this, message.to, one, true);
    });
  }

  std::unique_ptr<Transport::Pending> receive_long(const Incoming& message) override {
    return inside([&]() -> std::unique_ptr<Transport::Pending> {
      const auto one = parcel(message.data, message.bytes);
      lane_.enroll(one->memory);
      lane_.expect(message.from, *one);
      of(message.from).receives.push_back(one);
      announce(message.from);
      return std::make_unique<Long>(*this, message.from, one, false);
    });
  }

  void tell(const std::string& failure) noexcept override {
    try {
      const Failure own = failure_told(failure);
      group_.record(own.kind, own.text);
      inside([] { return true; });     // tells what is recorded
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): it has told
    }
  }

  std::optional<std::string> heard() override {
    try {
      inside([&] {
        lane_.progress();
        group_.heed();
        return true;
      });
    } catch (const Error& error) { return told(failure_of(error)); }
    return {};
  }

  void close() noexcept override { group_.leave(); }

 private:
  using Parcel = FabricEndpoint::Parcel;
  struct Peer {
    std::deque<std::shared_ptr<Parcel>> receives;  // whose places it has not been told
    std::deque<std::shared_ptr<Parcel>> sends;     // whose places have not come
    std::deque<Place> places;                      // whose sends have not begun
  };
  Peer& of(int peer) { return peers_[static_cast<std::size_t>(peer)]; }

  // A long message. `take` moves it on.
  class Long final : public Transport::Pending {
   public:
    Long(RingRecords& records, int peer, std::shared_ptr<Parcel> parcel, bool sends)
        : records_(records), peer_(peer), parcel_(std::move(parcel)), sends_(sends) {}
    ~Long() override {
      if (!over_) records_.abandon(*parcel_);
    }
    bool test() override {
      return over_ || records_.inside([&] { return come(); });
    }
    std::vector<int> open() override { return over_ ? std::vector<int>{} : std::vector<int>{peer_}; }

   private:
    bool come() {
      over_ = sends_ ? parcel_->to.bytes > 0 && parcel_->written.done()
                     : records_.lane_.has_come(peer_, *parcel_);
      if (!over_) return false;
      parcel_->memory.registrations.clear();
      std::erase(*records_.under_way_, parcel_);
      return true;
    }
    RingRecords& records_;
    int peer_;
    std::shared_ptr<Parcel> parcel_;
    bool sends_, over_ = false;
  };

  std::shared_ptr<Parcel> parcel(void* data, std::size_t bytes) {
    auto one = std::make_shared<Parcel>();
    one->memory.memory = {std::shared_ptr<byte>(), static_cast<byte*>(data)};
    one->memory.bytes = bytes;
    return under_way_->emplace_back(std::move(one));
  }

  // Tells a peer the places of its messages, as far as there is room for pieces.
  void announce(int peer) {
    auto& receives = of(peer).receives;
    RingChannel channel(lane_);
    while (!receives.empty() && !abandoned_ && channel.has_room(peer)) {
      require(peer);
      const fabric::Announcement it = receives.front()->memory.announcement();
      const Place place{it.address, it.bytes, it.keys.front()};
      byte* const at = channel.reserve(peer, sizeof kPlaceFollows + sizeof place).at;
      std::memcpy(at, &kPlaceFollows, sizeof kPlaceFollows);
      std::memcpy(at + sizeof kPlaceFollows, &place, sizeof place);
      channel.commit(peer, sizeof kPlaceFollows + sizeof place);
      receives.pop_front();
    }
  }

  // Begins the messages to a peer whose places have come.
  void give(int peer) {
    auto& [receives, sends, places] = of(peer);
    while (!sends.empty() && !places.empty() && !abandoned_) {
      group_.heed();  // who has failed or left does not wait for what is written to its memory
      require(peer);
      Parcel& one = *sends.front();
      const Place place = places.front();
      one.to = {place.address, place.bytes, {place.key}};
      if (place.bytes != one.memory.bytes || !one.to.possible(place.bytes))
        throw TransportError(peer, "it has told an impossible place for a message");
      lane_.give(peer, one);
      sends.pop_front();
      places.pop_front();
    }
  }

  // A rank that abandons a message fails or leaves. It begins no other message: its peers would take it for
  // this one.
  void abandon(Parcel& one) noexcept {
    if (group_.inherited()) return;
    auto end = [&] {
      abandoned_ = true;
      one.memory.registrations.clear();  // nobody writes there any more
      return true;
    };
    try {
      inside(end);
    } catch (const std::exception&) {  // the group has failed: nothing else uses its lane
      const std::scoped_lock lock(mutex_);
      end();
    }
  }

  void require(int peer) const {
    if (lane_.told(peer, Kind::departed)) throw TransportError(peer, "it has closed its communicator");
  }

  // Runs a step, as a call of the group. Throws the group's failure. Does nothing when closed.
  template <class Step>
  std::invoke_result_t<Step> inside(const Step& step) {
    const std::scoped_lock lock(mutex_);
    if (group_.left()) return {};
    struct End {
      FabricGroup& group;
      ~End() { group.ended(); }
    } const end{group_};
    group_.enter("messages with tags", 0);
    return step();
  }

  std::mutex mutex_;
  FabricGroup group_;
  FabricEndpoint& lane_ = group_.lane();
  const std::size_t most_ = std::min(lane_.chunk_bytes(), lane_.most_bytes()) - sizeof(Length);
  std::vector<Peer> peers_;
  std::unique_ptr<std::vector<std::shared_ptr<Parcel>>> under_way_ =
      std::make_unique<std::vector<std::shared_ptr<Parcel>>>();  // abandoned ones too, which libfabric may
                                                                 // use
  bool abandoned_ = false;
  int last_ = 0;  // whose record was taken
  Clock::time_point looked_{};
};

}  // namespace

std::unique_ptr<Records> make_records(Bootstrap& bootstrap, double timeout_s) {
  return std::make_unique<RingRecords>(bootstrap, timeout_s);
}

}  // namespace unisono::fabric
