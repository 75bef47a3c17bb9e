// Communicators of some of a communicator's ranks.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/backend.hpp"
#include "unisono/communicator.hpp"

namespace unisono {
namespace {

// How some ranks of a communicator meet: by messages of its calls, in which the others have no part.
class SplitBootstrap final : public Bootstrap {
 public:
  SplitBootstrap(Communicator::Impl& whole, std::vector<int> ranks)
      : whole_(whole), ranks_(std::move(ranks)) {}
  int rank() const override {
    return static_cast<int>(std::find(ranks_.begin(), ranks_.end(), whole_.rank()) - ranks_.begin());
  }
  int size() const override { return static_cast<int>(ranks_.size()); }

  std::vector<std::string> all_gather(const std::string& data) override {
    const std::uint64_t mine = data.size();
    std::vector<std::uint64_t> sizes(ranks_.size());
    exchange(&mine, sizeof mine, [&](std::size_t i) { return std::pair(&sizes[i], sizeof mine); });
    std::vector<std::string> all;
    for (const std::uint64_t size : sizes) all.emplace_back(size, '\0');
    exchange(data.data(), mine, [&](std::size_t i) { return std::pair(all[i].data(), all[i].size()); });
    return all;
  }

 private:
  // place(i): where the bytes of member i go, and how many they are.
  template <class PlaceOf>
  void exchange(const void* mine, std::size_t bytes, const PlaceOf& place) {
    std::vector<Outgoing> sends;
    std::vector<Incoming> receives;
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      const auto [at, expected] = place(i);
      sends.push_back({mine, bytes, ranks_[i]});
      receives.push_back({at, expected, ranks_[i]});
    }
    whole_.turn("split", [&] {
      const Call call{.dtype = DType::u8};
      whole_.run_within({call, whole_.rank(), whole_.size(), sends, receives});
    });
  }

  Communicator::Impl& whole_;
  const std::vector<int> ranks_;
};

struct Wish {
  std::int32_t color, key;
};

}  // namespace

std::optional<Communicator> Communicator::split(int color, int key) {
  const Wish mine{color, key};
  std::vector<Wish> wishes(static_cast<std::size_t>(size()));
  const Call call{.in = &mine, .out = wishes.data(), .count = sizeof mine, .dtype = DType::u8};
  impl_->turn("split", [&] { impl_->run_within({Collective::all_gather, call, rank(), size()}); });
  if (color < 0) return std::nullopt;
  std::vector<int> ranks;
  for (int r = 0; r < size(); ++r)
    if (wishes[static_cast<std::size_t>(r)].color == color) ranks.push_back(r);
  std::stable_sort(ranks.begin(), ranks.end(), [&](int a, int b) {
    return wishes[static_cast<std::size_t>(a)].key < wishes[static_cast<std::size_t>(b)].key;
  });
  const auto on_one_node = [&](const std::vector<int>& node) {
    return std::all_of(ranks.begin(), ranks.end(),
                       [&](int r) { return std::find(node.begin(), node.end(), r) != node.end(); });
  };
  const auto all_nodes = nodes();
  if (impl_->has_transport && std::none_of(all_nodes.begin(), all_nodes.end(), on_one_node))
    throw UsageError("the ranks of color " + std::to_string(color) +
                     " are on several nodes, and the transport is for all ranks: make their communicator by "
                     "a bootstrap of their own, or give a color to the ranks of each node.");
  return Communicator(std::make_shared<SplitBootstrap>(*impl_, std::move(ranks)), impl_->options_of_split());
}

}  // namespace unisono
