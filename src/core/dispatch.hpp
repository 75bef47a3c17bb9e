// From the name of an algorithm to its program on a lane.
#pragma once

#include <string>

#include "core/plan.hpp"
#include "lane/channel.hpp"
#include "programs/list.hpp"
#include "unisono/error.hpp"

namespace unisono {

[[noreturn]] inline void no_program(Collective collective, Algorithm algorithm) {
  throw UsageError(std::string(name_of(collective)) + " has no program for " +
                   std::string(name_of(algorithm)) + ": use another algorithm.");
}

// NOLINTBEGIN(bugprone-branch-clone): the algorithms of a collective may share a program
#define UNISONO_CASE(collective, algorithm, program, operand) \
  case program_key(Collective::collective, Algorithm::algorithm): return program(operand, args);

// Runs a program that takes any pointer, over packets or chunks.
template <class Channel>
void run_push(Channel channel, Collective collective, Algorithm form, const Args& args) {
  switch (program_key(collective, form)) {
    UNISONO_PUSH_PROGRAMS(UNISONO_CASE)
    default: no_program(collective, form);
  }
}

// Runs a direct program that only stores to peers.
template <class Lane>
void run_stores(Lane& lane, Collective collective, Algorithm algorithm, const Args& args) {
  switch (program_key(collective, algorithm)) {
    UNISONO_STORE_PROGRAMS(UNISONO_CASE)
    default: no_program(collective, algorithm);
  }
}

// Runs a direct program.
template <class Lane>
void run_direct(Lane& lane, Collective collective, Algorithm algorithm, const Args& args) {
  ChunkChannel<Lane> channel(lane);
  switch (program_key(collective, algorithm)) {
    UNISONO_STORE_PROGRAMS(UNISONO_CASE)
    UNISONO_LOAD_PROGRAMS(UNISONO_CASE)
    default: no_program(collective, algorithm);
  }
}

#undef UNISONO_CASE
// NOLINTEND(bugprone-branch-clone)

// Runs the program of an algorithm.
template <class Lane>
void run(Lane& lane, Collective collective, Algorithm algorithm, const Args& args) {
  if (is_direct(algorithm)) return run_direct(lane, collective, algorithm, args);
  const Algorithm form = form_of(algorithm);
  if (is_packets(algorithm)) return run_push(PacketChannel<Lane>(lane), collective, form, args);
  run_push(ChunkChannel<Lane>(lane), collective, form, args);
}

}  // namespace unisono
