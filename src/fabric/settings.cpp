#include "fabric/settings.hpp"

#include <algorithm>

#include "base/bytes.hpp"
#include "base/env.hpp"
#include "unisono/error.hpp"

namespace unisono::fabric {
namespace {

constexpr std::size_t kMostScratch = std::size_t{64} << 20;  // for the rings of a rank
constexpr std::size_t kMostChunk = std::size_t{256} << 10;
// The fewest bytes of a split transfer that pay for another NIC, and for another channel of the same NIC.
constexpr std::size_t kLeastShare = 64 << 10, kLeastShareOfNic = 4 << 20;

std::size_t chunk_bytes_for(int ranks) {
  if (env().chunk_bytes) return std::max(round_up(env().chunk_bytes, kAlign), FabricEndpoint::kLeastChunk);
  const std::size_t share =
      kMostScratch / FabricEndpoint::kChunks / static_cast<std::size_t>(std::max(ranks, 1));
  return std::clamp(share / 4096 * 4096, std::size_t{4096}, kMostChunk);
}

}  // namespace

FabricEndpoint::Settings settings_of(const Communicator::Fabric& asked, int ranks, bool device,
                                     double timeout_s) {
  FabricEndpoint::Settings made;
  made.timeout = std::chrono::duration<double>(timeout_s);
  made.provider = provider_named(asked.provider.empty() ? env().fabric_provider : asked.provider, device);
  made.channels = asked.channels.value_or(
      env().fabric_channels ? env().fabric_channels : static_cast<int>(made.provider.nics.size()));
  if (made.channels < 1 || made.channels > made.provider.most_channels)
    throw UsageError("there cannot be " + std::to_string(made.channels) + " channels: provider " +
                     made.provider.name + " gives 1 to " + std::to_string(made.provider.most_channels) +
                     " here.");
  made.policy = asked.policy;
  made.chunk_bytes = chunk_bytes_for(ranks);
  made.least_share = env().fabric_share              ? env().fabric_share
                     : made.provider.nics.size() > 1 ? kLeastShare
                                                     : kLeastShareOfNic;
  made.completions = env().fabric_completions;
  return made;
}

}  // namespace unisono::fabric
