// How a FabricEndpoint writes to its peers: in which parts, over which channels, and from which memory.
#include <algorithm>

#include "base/bytes.hpp"
#include "fabric/endpoint.hpp"

namespace unisono {

using fabric::Announcement;
using fabric::Immediate;
using fabric::Kind;
using fabric::Write;

std::size_t FabricEndpoint::shares(std::size_t bytes) const {
  if (settings_.policy != ChannelPolicy::multi) return 1;
  return std::clamp<std::size_t>(bytes / settings_.least_share, 1, channels_.size());
}

std::size_t FabricEndpoint::parts(std::size_t bytes) const {
  const std::size_t split = shares(bytes), share = round_up((bytes + split - 1) / split, kAlign);
  std::size_t count = 0;
  for (std::size_t s = 0; s < split; ++s)
    count += (block_of(bytes, share, static_cast<int>(s)).bytes + most_bytes_ - 1) / most_bytes_;
  return std::max<std::size_t>(count, 1);
}

FabricEndpoint::Part FabricEndpoint::part(int peer, std::size_t bytes, std::size_t index) const {
  const std::size_t split = shares(bytes), share = round_up((bytes + split - 1) / split, kAlign);
  for (std::size_t s = 0;; ++s) {
    const Range range = block_of(bytes, share, static_cast<int>(s));
    const std::size_t writes = (range.bytes + most_bytes_ - 1) / most_bytes_;
    if (index >= writes && s + 1 < split) {
      index -= writes;
      continue;
    }
    const std::size_t begin = index * most_bytes_;
    return {(usual_channel(peer) + static_cast<int>(s)) % channels(), range.begin + begin,
            std::min(most_bytes_, range.bytes - begin)};
  }
}

int FabricEndpoint::usual_channel(int peer) const {
  return settings_.policy == ChannelPolicy::single ? 0 : (peer + rank_) % channels();
}

Write FabricEndpoint::write_to(int peer, const Announcement& its, std::uint64_t offset, std::size_t bytes,
                               int channel, Kind kind, std::uint64_t number) const {
  if (!its.holds(offset, bytes))
    watch_.unreachable(peer, "its region of " + std::to_string(its.bytes) + " bytes has no " +
                                 std::to_string(bytes) + " at " + std::to_string(offset));
  Write made;
  made.peer = peer;
  made.bytes = bytes;
  made.to = channels_[static_cast<std::size_t>(channel)]->by_address() ? its.address + offset : offset;
  made.key = its.keys[static_cast<std::size_t>(channel)];
  made.immediate = Immediate{rank_, kind, static_cast<std::uint32_t>(number % Immediate::kNumbers)}.word();
  return made;
}

void* FabricEndpoint::descriptor(const byte* from, std::size_t bytes, int channel) const {
  for (const auto& region : regions_)
    if (region && region->holds(from, bytes)) return region->descriptor(channel);
  return nullptr;
}

// Takes its numbers before the first wait: transfers of a kind to a peer are numbered in the order of calls.
// A parcel has places of its own: `region` and `offset` are not looked at.
fabric::Task FabricEndpoint::transfer(int peer, const byte* from, std::size_t bytes, std::size_t region,
                                      std::uint64_t offset, Kind kind, Parcel* parcel) {
  const std::size_t writes = parts(bytes);
  const std::uint64_t first = of(peer).number(kind);
  of(peer).number(kind) += writes;
  fabric::Batch& batch = parcel ? parcel->written : of(peer).in_flight;
  batch.add();  // until all is queued
  for (std::size_t i = 0; i < writes; ++i) {
    const Part one = part(peer, bytes, i);
    Write write = write_to(peer, parcel ? parcel->to : of(peer).regions[region], offset + one.begin,
                           one.bytes, one.channel, kind, first + i);
    write.from = from + one.begin;
    write.descriptor =
        parcel ? parcel->memory.descriptor(one.channel) : descriptor(write.from, one.bytes, one.channel);
    co_await channels_[static_cast<std::size_t>(one.channel)]->write(write, batch);
  }
  batch.complete();
}

void FabricEndpoint::start(fabric::Task task) {
  if (!task.done()) tasks_.push_back(std::move(task));
}

void FabricEndpoint::move(const Dst* dsts, int n_dsts, const byte* const* srcs, int n_srcs,
                          std::size_t bytes) {
  if (bytes == 0) return;
  if (n_srcs > 1) return reduce_(dsts, n_dsts, srcs, n_srcs, bytes);
  for (int d = 0; d < n_dsts; ++d)
    if (host::is_far(dsts[d].at)) put_far(dsts[d], srcs[0], bytes);
  for (int d = 0; d < n_dsts; ++d)  // while the far writes travel
    if (!host::is_far(dsts[d].at)) kernels_.copy(&dsts[d], 1, srcs[0], bytes);
}

void FabricEndpoint::put_far(const Dst& to, const byte* from, std::size_t bytes) {
  const int peer = host::rank_of(to.at);
  const std::uint64_t address = host::address_of(to.at);
  const auto& regions = of(peer).regions;
  for (std::size_t number = kScratch + 1; number < regions.size(); ++number)
    if (address >= regions[number].address && regions[number].holds(address - regions[number].address, bytes))
      return start(transfer(peer, from, bytes, number, address - regions[number].address, Kind::bulk));
  watch_.unreachable(
      peer, "none of its regions has " + std::to_string(bytes) + " bytes at the place that it announced");
}

void FabricEndpoint::give(int peer, Parcel& parcel) {
  const fabric::Region& mine = parcel.memory;
  start(transfer(peer, mine.memory.get(), mine.bytes, kScratch, 0, Kind::bulk, &parcel));
}

void FabricEndpoint::expect(int peer, Parcel& parcel) {
  parcel.first = of(peer).parcels_expected;
  parcel.end = of(peer).parcels_expected += parts(parcel.memory.bytes);
}

}  // namespace unisono
