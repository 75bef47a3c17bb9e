// Memory of a rank that no other rank reaches.
#pragma once

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "core/allocation.hpp"
#include "core/backend.hpp"
#include "host/segment.hpp"
#include "moe/dims.hpp"

namespace unisono::moe {

// The ranks, for AllocationAgreement.
struct AllRanks {
  Communicator::Impl& impl;
  int rank() const { return impl.rank(); }
  int number(int rank) const { return impl.number(rank); }
  [[noreturn]] void fail(FailureKind kind, const std::string& text) const {
    impl.fail({kind, text});
    raise({kind, text});
  }
  template <class T>
  std::vector<T> exchange(const T& mine) const {
    std::vector<T> all(at(impl.size()), mine);
    const Call call{.in = &mine, .out = all.data(), .count = sizeof mine, .dtype = DType::u8};
    impl.run_within({Collective::all_gather, call, impl.rank(), impl.size()});
    return all;
  }
};

// Memory for what messages may bring at most. The machine gives a page when a call first writes there, so
// that few tokens take little of it.
using PrivateMemory = std::unique_ptr<byte, decltype(&std::free)>;
inline PrivateMemory allocated(Communicator::Impl& impl, std::size_t received, std::size_t bytes) {
  PrivateMemory memory(nullptr, std::free);
  impl.turn("moe", [&] {
    AllRanks ranks{impl};
    AllocationAgreement agreement(ranks, bytes, "memory of a moe");
    agreement.attempt([&] {
      check_room(received);
      memory.reset(static_cast<byte*>(std::aligned_alloc(4096, round_up(bytes, 4096))));
      if (!memory) throw ResourceError("the system refuses so many bytes.");
    });
    agreement.meet();
  });
  return memory;
}

}  // namespace unisono::moe
