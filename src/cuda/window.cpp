#include "unisono/window.hpp"

#include <algorithm>
#include <string>

#include "core/backend.hpp"
#include "cuda/engine.hpp"
#include "cuda/window.hpp"

namespace unisono {

Window::Window(Communicator& communicator, std::size_t bytes)
    : impl_(*communicator.impl_),
      area_(communicator, bytes, cuda::window_signals(communicator.size()), "a window"),
      sent_(static_cast<std::size_t>(communicator.size())) {}

void Window::begin(void* stream) {
  impl_.turn("window", [&] {
    impl_.take_gpu(stream);
    impl_.gpu()->begin_window(area_.handle(), stream);
  });
  std::fill(sent_.begin(), sent_.end(), 0);
}

void Window::check_peer(int peer) const {
  const int ranks = area_.handle().ranks, rank = area_.handle().rank;
  if (peer < 0 || peer >= ranks || peer == rank)
    throw UsageError("peer " + std::to_string(peer) + " is no other rank: give one of the " +
                     std::to_string(ranks) + " ranks, but not " + std::to_string(rank) + " itself.");
}

void Window::put_signal(const void* source, std::size_t bytes, int peer, std::size_t offset, void* stream) {
  check_peer(peer);
  if (offset > area_.bytes() || bytes > area_.bytes() - offset)
    throw UsageError(std::to_string(bytes) + " bytes at offset " + std::to_string(offset) +
                     " do not fit in a window of " + std::to_string(area_.bytes()) +
                     ": put them elsewhere, or make a larger window.");
  const auto count = static_cast<std::uint32_t>(++sent_[static_cast<std::size_t>(peer)]);
  impl_.gpu()->put_signal(area_.handle(), {static_cast<const byte*>(source), bytes}, peer, offset, count,
                          stream);
}

void Window::wait_signals(std::span<const int> peers, int count, void* stream) {
  cuda::WindowWait wait{.area = area_.handle(), .count = static_cast<std::uint32_t>(count)};
  for (const int peer : peers) {
    check_peer(peer);
    wait.add(peer);
  }
  if (!peers.empty()) impl_.gpu()->wait_signals(wait, stream);
}

}  // namespace unisono
