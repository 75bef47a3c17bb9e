// Memory on a GPU and a space for its calls, for tests.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "cuda/api.hpp"
#include "cuda/nodes.hpp"
#include "reference.hpp"
#include "unisono/communicator.hpp"

namespace unisono::cuda {

using nodes::Scratch;
using test::Bytes;

inline constexpr std::size_t kGuard = 256;  // bytes around an output, which must stay as they are

class DeviceBytes {
 public:
  explicit DeviceBytes(std::size_t bytes) {
    void* made = nullptr;
    check(cudaMalloc(&made, std::max<std::size_t>(bytes, 1)), "a test's memory");
    at_ = static_cast<byte*>(made);
  }
  explicit DeviceBytes(const Bytes& host) : DeviceBytes(host.size()) { write(host); }
  DeviceBytes(const DeviceBytes&) = delete;
  ~DeviceBytes() { cudaFree(at_); }
  byte* at() const { return at_; }
  void write(const Bytes& host) const {
    check(cudaMemcpy(at_, host.data(), host.size(), cudaMemcpyHostToDevice), "a test's copy");
    // the copy may still be under way, and other streams do not wait for it
    check(cudaDeviceSynchronize(), "a test's copy");
  }

 private:
  byte* at_ = nullptr;
};

inline Bytes read_back(const byte* at, std::size_t bytes) {
  Bytes host(bytes);
  check(cudaMemcpy(host.data(), at, bytes, cudaMemcpyDeviceToHost), "a test's copy");
  return host;
}

// Several arrays of one length, on the host and on the GPU, at an offset in bytes from a multiple of 16.
class Arrays {
 public:
  Arrays(const std::vector<Bytes>& arrays, std::size_t offset) {
    std::size_t stride = 0;
    for (const Bytes& one : arrays) stride = std::max(stride, round_up(one.size() + offset, 256));
    host_.resize(stride * arrays.size());
    for (std::size_t s = 0; s < arrays.size(); ++s)
      std::copy(arrays[s].begin(), arrays[s].end(), host_.data() + s * stride + offset);
    device_.emplace(host_);
    for (std::size_t s = 0; s < arrays.size(); ++s) {
      on_host.push_back(host_.data() + s * stride + offset);
      on_device.push_back(device_->at() + s * stride + offset);
    }
  }
  std::vector<const byte*> on_host, on_device;

 private:
  Bytes host_;
  std::optional<DeviceBytes> device_;
};

class Gpu : public testing::Test {
 protected:
  void SetUp() override {
    if (device_count() == 0) GTEST_SKIP() << "needs a GPU";
    check(cudaSetDevice(0), "cudaSetDevice");
    space = make_space(0);
    for (cudaStream_t& stream : streams)
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a test's stream");
  }
  void TearDown() override {
    cudaDeviceSynchronize();
    space.reset();
    for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
  }
  template <class Body>
  void call(cudaStream_t stream, const Body& body) {
    space->begin(stream);
    body();
    space->end();
  }
  template <class Body>
  void call_and_wait(const Body& body) {
    call(streams[0], body);
    check(cudaStreamSynchronize(streams[0]), "a test's call");
  }
  template <class Body>
  cudaGraphExec_t captured(const Body& body) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t ready = nullptr;
    check(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeGlobal), "a test's capture");
    call(streams[0], body);
    check(cudaStreamEndCapture(streams[0], &graph), "a test's capture");
    check(cudaGraphInstantiate(&ready, graph, 0), "a test's graph");
    cudaGraphDestroy(graph);
    return ready;
  }
  // Makes later work on the stream wait until `held` is false, at most 20 s.
  void hold(cudaStream_t stream) {
    held = true;
    auto wait = [](void* flag) {
      for (int i = 0; i < 20'000 && *static_cast<std::atomic<bool>*>(flag); ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    check(cudaLaunchHostFunc(stream, wait, &held), "a test's wait");
  }
  std::atomic<bool> held = false;
  std::unique_ptr<nodes::GpuSpace> space;
  cudaStream_t streams[2] = {};
};

}  // namespace unisono::cuda
