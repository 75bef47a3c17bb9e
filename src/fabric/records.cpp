#include "fabric/records.hpp"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <type_traits>

#include "base/bytes.hpp"
#include "base/deadline.hpp"
#include "base/failure.hpp"
#include "fabric/fabric_group.hpp"
#include "fabric/ring.hpp"
#include "fabric/settings.hpp"

namespace unisono::fabric {
namespace {

using Length = std::uint64_t;  // bytes of a record, before it in its piece

FabricEndpoint::Settings settings(int ranks, double timeout_s) {
  FabricEndpoint::Settings made = settings_of({.channels = 1}, ranks, false, timeout_s);
  made.chunk_bytes = std::max(round_up(made.chunk_bytes / 2, kAlign), FabricEndpoint::kLeastChunk);
  return made;
}

// A record is a piece in the ring of its pair, on endpoints that no call uses.
class RingRecords final : public Records {
 public:
  RingRecords(Bootstrap& bootstrap, double timeout_s)
      : group_(bootstrap,
               {.check = false, .lane = settings(bootstrap.size(), timeout_s), .while_waiting = {}}) {}

  std::size_t most_bytes() const override { return most_ - kMostHead; }

  bool send(int to, std::span<const std::byte> head, std::span<const std::byte> data) override {
    return inside([&] {
      if (lane_.told(to, Kind::departed)) throw TransportError(to, "it has closed its communicator");
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
        if (peer == lane_.rank() || !lane_.piece_comes(peer)) continue;
        RingChannel channel(lane_);
        const byte* const at = channel.arrived(peer, 1);  // of any length, a piece is one write
        Length length;
        std::memcpy(&length, at, sizeof length);
        if (length > most_) throw TransportError(peer, "it has sent what is no record");
        record.resize(length);
        std::memcpy(record.data(), at + sizeof length, length);
        channel.release(peer);
        return last_ = peer;
      }
      if (const auto now = Clock::now(); now - looked_ > kLook) {
        looked_ = now;
        group_.look();
      }
      return {};
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
  int last_ = 0;  // whose record was taken
  Clock::time_point looked_{};
};

}  // namespace

std::unique_ptr<Records> make_records(Bootstrap& bootstrap, double timeout_s) {
  return std::make_unique<RingRecords>(bootstrap, timeout_s);
}

}  // namespace unisono::fabric
