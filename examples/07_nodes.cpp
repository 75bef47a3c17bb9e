// An MPI program whose ranks may be on several nodes. Ranks of a node share memory; MPI carries the messages
// between nodes.
//
//   mpicxx -std=c++20 -I include examples/07_nodes.cpp -L build/tests -lunisono -o nodes
//   mpiexec -n 4 ./nodes
//
// Ranks of one machine with different values of UNISONO_NODE are on different nodes.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "unisono/mpi.hpp"

namespace {

// Sums over all ranks, and returns whether the sum is right.
bool sum() {
  unisono::Communicator comm = unisono::mpi::communicator(MPI_COMM_WORLD, {.timeout_s = 30});
  const int rank = comm.rank(), size = comm.size();
  const std::vector<float> x(1'000'000, static_cast<float>(rank + 1));
  std::vector<float> y(x.size());
  comm.all_reduce({.in = x.data(), .out = y.data(), .count = x.size()});
  const auto expected = static_cast<float>(size * (size + 1) / 2);
  const bool right = std::all_of(y.begin(), y.end(), [&](float one) { return one == expected; });
  const auto nodes = comm.nodes();
  const auto node = std::find_if(nodes.begin(), nodes.end(), [&](const std::vector<int>& ranks) {
    return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
  });
  const std::string between = nodes.size() > 1 ? ", by " + comm.transport() + " between nodes" : "";
  std::printf("rank %d of %d, node %d of %d: the sum is %s%s\n", rank, size,
              static_cast<int>(node - nodes.begin()), static_cast<int>(nodes.size()),
              right ? "right" : "wrong", between.c_str());
  return right;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  bool right = false;
  try {
    right = sum();  // the communicator ends before MPI does
  } catch (const unisono::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return right ? 0 : 1;
}
