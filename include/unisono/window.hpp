// Memory of every GPU that the others write to by their copy engines.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "unisono/communicator.hpp"
#include "unisono/device/area.hpp"
#include "unisono/version.hpp"

namespace unisono {

// Memory of the same size on every rank's GPU, into which ranks put data with signals. Copy engines move the
// data: it travels while a kernel, such as a matmul, has all SMs. A kernel of one block waits for signals.
//
// Order: work on a window comes in rounds. `begin` is a call of the communicator, and so collective. What
// follows it on this rank's streams may put into every window, and reads what signals tell of. All signals of
// a round are waited for before the next `begin`, on the stream of that or on one that it follows. A graph
// may capture whole rounds.
//
// Failure: as a DeviceArea's. Copies are made even after a failure.
class UNISONO_API Window {
 public:
  // Collective; waits for the GPU. Throws what DeviceArea does.
  Window(Communicator& communicator, std::size_t bytes);

  // Returns this rank's memory, which begins at a multiple of 256 bytes.
  void* local() const { return area_.local(); }
  std::size_t bytes() const { return area_.bytes(); }

  // Begins a round: `stream` goes on when every rank's has come here, and is done with the round before.
  // Throws the errors of the communicator's calls.
  void begin(void* stream);

  // Copies to `offset` in the window of `peer`, another rank; then counts one signal from this rank there.
  // Puts to one peer are made on streams that follow each other. No bytes: a signal alone.
  // Throws UsageError if there is no such rank or place.
  void put_signal(const void* source, std::size_t bytes, int peer, std::size_t offset, void* stream);

  // Lets the stream wait until each of these ranks has sent this one `count` signals in this round.
  // Throws UsageError if there is no such rank.
  void wait_signals(std::span<const int> peers, int count, void* stream);

 private:
  void check_peer(int peer) const;

  Communicator::Impl& impl_;
  DeviceArea area_;
  std::vector<int> sent_;  // signals of this round, by rank
};

}  // namespace unisono
