#include "fabric/endpoint.hpp"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "base/deadline.hpp"
#include "base/text.hpp"
#include "unisono/error.hpp"

namespace unisono {

using fabric::Announcement;
using fabric::Immediate;
using fabric::Kind;
using fabric::Write;

namespace {

constexpr std::size_t kNotes = 4;            // of a kind: a peer is never more than two signals ahead
constexpr std::size_t kMostWrite = 1 << 30;  // of one write, whatever the provider allows
// How long an idle wait yields before it sleeps. A rank that yields takes turns from ranks that copy.
constexpr std::chrono::microseconds kYielding{2000}, kYieldingCrowded{50};
constexpr auto kNap = std::chrono::microseconds(50);

}  // namespace

// Offsets in the scratch: first what peers write to, by writer, then what only its own rank uses, by peer.
struct FabricEndpoint::Layout {
  std::size_t ranks, chunk;
  std::size_t notes() const { return fabric::kKinds * kNotes * sizeof(std::uint64_t); }  // of a writer
  std::size_t ring() const { return kChunks * chunk; }
  std::size_t failures_at() const { return round_up(ranks * notes(), 4096); }
  std::size_t rings_at() const { return failures_at() + round_up(ranks * kFailureBytes, 4096); }
  std::size_t own_at() const { return rings_at() + ranks * ring(); }
  std::size_t bytes() const { return own_at() + rings_at() + ranks * ring(); }

  std::size_t note(int rank, Kind kind, std::uint64_t number) const {
    return static_cast<std::size_t>(rank) * notes() +
           (static_cast<std::size_t>(kind) * kNotes + number % kNotes) * sizeof(std::uint64_t);
  }
  std::size_t failure(int rank) const {
    return failures_at() + static_cast<std::size_t>(rank) * kFailureBytes;
  }
  std::size_t chunk_of(int rank, std::uint64_t piece) const {
    return rings_at() + static_cast<std::size_t>(rank) * ring() + piece % kChunks * chunk;
  }
};

FabricEndpoint::Layout FabricEndpoint::layout() const { return {peers_.size(), settings_.chunk_bytes}; }

FabricEndpoint::FabricEndpoint(int rank, int ranks, const Settings& settings, Watch watch)
    : rank_(rank),
      settings_(settings),
      watch_(std::move(watch)),
      most_bytes_(kMostWrite),
      kernels_(host::kernels()),
      peers_(static_cast<std::size_t>(ranks)),
      sources_(peers_.size()),
      destinations_(peers_.size()) {
  const int nics = static_cast<int>(settings_.provider.nics.size()), all = settings_.channels;
  for (int p = 0; p < std::min(nics, all); ++p)
    estate_.ports.push_back(std::make_unique<fabric::Port>(
        settings_.provider.nics[static_cast<std::size_t>(p)], (all - p + nics - 1) / nics,
        [this](int peer, const std::string& why) { watch_.broken(peer, why); }, calls_,
        settings_.completions));
  for (int c = 0; c < all; ++c) {  // they take turns on the NICs
    channels_.push_back(
        std::make_unique<fabric::Channel>(*estate_.ports[static_cast<std::size_t>(c % nics)]));
    most_bytes_ = std::min(most_bytes_, channels_.back()->most_bytes());
  }
  auto scratch = std::make_shared<fabric::Region>();
  scratch->bytes = layout().bytes();
  scratch->memory = fabric::host_memory(scratch->bytes);
  enroll(*scratch);
  regions_.push_back(std::move(scratch));
}

// The estates of a group's ranks in this process that are destroyed, kept until the last rank is.
struct FabricEndpoint::House {
  std::mutex mutex;
  std::vector<Estate> left;

  static std::shared_ptr<House> of(const std::string& name) {
    static std::mutex mutex;
    static std::map<std::string, std::weak_ptr<House>> known;
    const std::scoped_lock lock(mutex);
    std::erase_if(known, [](const auto& one) { return one.second.expired(); });
    std::shared_ptr<House> house = known[name].lock();
    if (!house) known[name] = house = std::make_shared<House>();
    return house;
  }
};

FabricEndpoint::~FabricEndpoint() {
  abandon();
  if (!house_) return;
  const std::scoped_lock lock(house_->mutex);
  house_->left.push_back(std::move(estate_));
}

void FabricEndpoint::keep_until_last(const std::string& name) { house_ = House::of(name); }

FabricEndpoint::Contact FabricEndpoint::contact() const {
  Contact mine;
  for (const auto& channel : channels_) mine.addresses.push_back(channel->address());
  mine.scratch = regions_[kScratch]->announcement();
  return mine;
}

void FabricEndpoint::connect(std::vector<Contact> contacts, bool crowded) {
  yielding_ = crowded && !settings_.provider.datagrams ? kYieldingCrowded : kYielding;
  for (std::size_t c = 0; c < channels_.size(); ++c) {
    std::vector<std::string> addresses;
    for (const Contact& one : contacts) addresses.push_back(one.addresses[c]);
    channels_[c]->connect(addresses);
  }
  for (std::size_t r = 0; r < contacts.size(); ++r) peers_[r].regions = {std::move(contacts[r].scratch)};
}

void FabricEndpoint::enroll(fabric::Region& region, const cuda::Dmabuf& dmabuf) const {
  const std::size_t ports = estate_.ports.size();
  for (std::size_t c = 0; c < channels_.size(); ++c)
    region.registrations.push_back(c >= ports && !channels_[c]->enrolls_alone()
                                       ? region.registrations[c - ports]
                                       : std::make_shared<const fabric::Registration>(channels_[c]->enroll(
                                             region.memory.get(), region.bytes, region.device, dmabuf)));
}

std::uint32_t FabricEndpoint::free_number() const {
  return static_cast<std::uint32_t>(std::find(regions_.begin(), regions_.end(), nullptr) - regions_.begin());
}

void FabricEndpoint::add_region(std::shared_ptr<fabric::Region> region) {
  const std::uint32_t number = free_number();
  regions_.resize(std::max<std::size_t>(regions_.size(), number + 1));
  regions_[number] = std::move(region);
}

bool FabricEndpoint::learn_region(int peer, std::uint32_t number, const Announcement& announced) {
  auto& regions = of(peer).regions;
  if (number == kScratch || number > regions.size()) return false;
  // what it has dropped may have lain there
  for (std::size_t other = kScratch + 1; other < regions.size(); ++other)
    if (announced.address < regions[other].address + regions[other].bytes &&
        regions[other].address < announced.address + announced.bytes)
      regions[other] = {};
  regions.resize(std::max<std::size_t>(regions.size(), number + 1));
  regions[number] = announced;
  return true;
}

void FabricEndpoint::forget_released() {
  for (auto& region : regions_)
    if (region && region->released->load()) region.reset();
}

std::pair<std::uint32_t, std::uint64_t> FabricEndpoint::find(const byte* at, std::size_t bytes) const {
  for (std::size_t number = 1; number < regions_.size(); ++number)
    if (regions_[number] && regions_[number]->holds(at, bytes))
      return {static_cast<std::uint32_t>(number),
              static_cast<std::uint64_t>(at - regions_[number]->memory.get())};
  return {0, 0};
}

byte* FabricEndpoint::reach(int peer, std::uint32_t number, std::uint64_t offset, std::size_t bytes) const {
  const auto& regions = of(peer).regions;
  if (number == kScratch || number >= regions.size() || !regions[number].holds(offset, bytes)) return nullptr;
  if (peer == rank_) return regions_[number] ? regions_[number]->memory.get() + offset : nullptr;
  return host::far_address(peer, regions[number].address + offset);
}

// ---- signals and pieces -----------------------------------------------------------------------------------

// Sends a note, which `finish` waits for like other writes. A note behind others may lie in a queue that
// libfabric looks at only when asked, and this rank may not ask again before the peer has the note. A
// datagram is complete only when the peer looks once more, who may have gone: such a note is not waited for.
void FabricEndpoint::note(int peer, Kind kind, std::uint64_t value) {
  const Layout layout = this->layout();
  const std::uint64_t number = of(peer).number(kind);
  const std::size_t offset = layout.note(rank_, kind, number);
  byte* const own = regions_[kScratch]->memory.get() + layout.own_at() + layout.note(peer, kind, number);
  std::memcpy(own, &value, sizeof value);
  if (!settings_.provider.datagrams) return start(transfer(peer, own, sizeof value, kScratch, offset, kind));
  const int channel = usual_channel(peer);
  fabric::Channel& on = *channels_[static_cast<std::size_t>(channel)];
  Write write = write_to(peer, of(peer).regions[kScratch], offset, sizeof value, channel, kind, number);
  write.from = own;
  if (on.nic().tx_attr->inject_size >= sizeof value && on.try_inject(write)) ++of(peer).number(kind);
  else start(transfer(peer, own, sizeof value, kScratch, offset, kind));
}

namespace {

Kind kind_of(Slot slot) { return slot == Slot::chunk_credit ? Kind::credit : Kind::meet; }

}  // namespace

void FabricEndpoint::signal(int peer, Slot slot) { note(peer, kind_of(slot), of(peer).number(Kind::bulk)); }

// Waits for a meeting's note, which counts the peer's earlier writes to this rank's regions, and for those.
void FabricEndpoint::wait(int peer, Slot) {
  Peer& its = of(peer);
  const std::uint64_t number = its.met++;
  await(peer, [&] { return its.has(Kind::meet).has(number, number + 1); });
  const Layout layout = this->layout();
  std::uint64_t written;
  std::memcpy(&written, regions_[kScratch]->memory.get() + layout.note(peer, Kind::meet, number),
              sizeof written);
  await(peer, [&] { return its.has(Kind::bulk).count() >= written; });
}

bool FabricEndpoint::must_stage(const byte* from, std::size_t bytes) const {
  if (!sources_stay_) return true;
  if (!needs_local_registration()) return false;
  return std::none_of(regions_.begin(), regions_.end(),
                      [&](const auto& region) { return region && region->holds(from, bytes); });
}

byte* FabricEndpoint::outbox(int peer, std::uint64_t piece) {
  const Layout layout = this->layout();
  return regions_[kScratch]->memory.get() + layout.own_at() + layout.chunk_of(peer, piece);
}

void FabricEndpoint::give_piece(int peer, const byte* from, std::size_t bytes) {
  const Layout layout = this->layout();
  const std::uint64_t piece = of(peer).pieces_given++;
  if (bytes == 0) return note(peer, Kind::piece, 0);
  start(transfer(peer, from, bytes, kScratch, layout.chunk_of(rank_, piece), Kind::piece));
}

const byte* FabricEndpoint::take_piece(int peer, std::size_t bytes) {
  const Layout layout = this->layout();
  Peer& its = of(peer);
  const std::uint64_t first = its.parts_taken, end = first + parts(bytes);
  await(peer, [&] { return its.has(Kind::piece).has(first, end); });
  its.parts_taken = end;
  return regions_[kScratch]->memory.get() + layout.chunk_of(peer, its.pieces_taken++);
}

// ---- waiting ----------------------------------------------------------------------------------------------

void FabricEndpoint::accept(std::uint32_t word) {
  const Immediate one = Immediate::of(word);
  if (one.rank >= size() || one.rank == rank_ || static_cast<int>(one.kind) >= fabric::kKinds)
    return watch_.refused(one, "no rank sends such a one");
  if (!of(one.rank).arrived[static_cast<int>(one.kind)].accept(one.number))
    watch_.refused(one, "it is a duplicate, or a stale one");
}

bool FabricEndpoint::progress() {
  bool any = false;
  for (const auto& port : estate_.ports) any |= port->progress([this](std::uint32_t word) { accept(word); });
  for (const auto& channel : channels_) any |= channel->progress();
  if (any) std::erase_if(tasks_, [](const fabric::Task& task) { return task.done(); });
  return any;
}

void FabricEndpoint::await(int peer, const std::function<bool()>& ready) {
  Clock::duration now{}, busy{};
  wait_until(
      ready, settings_.timeout,
      [&](Clock::duration elapsed) {
        now = elapsed;
        if (progress()) busy = now;
        else if (now - busy < yielding_) ::sched_yield();
        else std::this_thread::sleep_for(kNap);
      },
      [&] { watch_.look(peer, std::chrono::duration<double>(now).count(), ready); },
      [&] { watch_.late(peer); });
}

void FabricEndpoint::finish() {
  for (int i = 1; i < size(); ++i) {
    const int peer = peer_at(*this, i);
    await(peer, [&] { return of(peer).in_flight.done() || told(peer, Kind::departed); });
  }
  sources_stay_ = false;
}

// ---- words that need no answer ----------------------------------------------------------------------------

void FabricEndpoint::tell(int peer, Kind kind) {
  const Layout layout = this->layout();
  const std::uint64_t number = of(peer).number(kind);
  start(transfer(peer, regions_[kScratch]->memory.get() + layout.own_at() + layout.note(peer, kind, number),
                 sizeof(std::uint64_t), kScratch, layout.note(rank_, kind, number), kind));
}

void FabricEndpoint::tell_failure(const std::string& text, const std::function<bool(int peer)>& lives) {
  const Layout layout = this->layout();
  byte* const own = regions_[kScratch]->memory.get() + layout.own_at() + layout.failure(rank_);
  const std::string_view said = fitting(text, kFailureBytes - 1);
  std::memcpy(own, said.data(), said.size());
  own[said.size()] = byte{0};
  for (int i = 1; i < size(); ++i)
    if (const int peer = peer_at(*this, i); lives(peer))
      start(transfer(peer, own, said.size() + 1, kScratch, layout.failure(rank_), Kind::failure));
}

std::string FabricEndpoint::failure_of(int peer) const {
  const Layout layout = this->layout();
  const auto* text = reinterpret_cast<const char*>(regions_[kScratch]->memory.get() + layout.failure(peer));
  return {text, ::strnlen(text, kFailureBytes)};
}

void FabricEndpoint::abandon() noexcept {
  for (const auto& channel : channels_) channel->abandon();
  for (fabric::Task& task : tasks_) abandoned_.push_back(std::move(task));
  tasks_.clear();
}

}  // namespace unisono
