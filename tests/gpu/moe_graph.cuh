// A graph of a rank's calls, which may be replayed.
#pragma once

#include "moe_world.cuh"

namespace {

class Graph {
 public:
  // Captures what `calls` enqueues on the rank's stream. Collective.
  template <class Calls>
  Graph(Rank& rank, const Calls& calls) : rank_(rank) {
    check(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal), "a capture");
    calls();
    check(cudaStreamEndCapture(rank.stream, &graph_), "a capture");
    check(cudaGraphInstantiate(&replayed_, graph_, 0), "a graph");
    check(cudaGraphUpload(replayed_, rank.stream), "a graph");
    rank.comm.barrier();  // no rank waits for the GPU while another one captures
    rank.ready();
  }
  void replay() const { check(cudaGraphLaunch(replayed_, rank_.stream), "a graph"); }
  // Ends it, once its last replay has ended. Collective.
  void end() {
    check(cudaGraphExecDestroy(replayed_), "a graph");
    check(cudaGraphDestroy(graph_), "a graph");
    rank_.comm.barrier();
  }

 private:
  Rank& rank_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t replayed_ = nullptr;
};

}  // namespace
