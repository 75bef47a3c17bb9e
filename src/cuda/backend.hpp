// The ranks of one machine, each with a GPU. Calls on host memory are LocalCommunicator's.
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "cuda/engine.hpp"
#include "host/backend.hpp"

namespace unisono {

class GpuCommunicator final : public LocalCommunicator {
 public:
  // Requires: options.device. numbers: as Group's.
  GpuCommunicator(Bootstrap& bootstrap, const Communicator::Options& options,
                  const std::vector<int>& numbers = {});

  std::optional<int> device() const override { return engine_->device(); }
  bool tells_before_rest() const override { return false; }  // a call may wait for the GPU
  bool peer_access() const override { return engine_->peer_access(); }
  bool nvlink() const override { return engine_->nvlink(); }
  std::string_view card() const override { return engine_->card(); }
  void synchronize(void* stream) override { engine_->synchronize(stream); }
  void* last_stream() const override { return engine_->last_stream(); }
  int take_gpu(void* stream) override { return engine_->take(stream); }
  void set_gpu_timeout(double timeout_s) override { engine_->set_timeout(timeout_s); }
  cuda::Engine* gpu() override { return engine_.get(); }

  Algorithm choose(Collective collective, std::size_t bytes, bool symmetric, Memory memory,
                   bool in_place) override;
  Algorithm choose_wire(std::size_t bytes, Memory memory) override;
  int sms(Collective collective, std::size_t bytes, bool symmetric, Algorithm algorithm,
          bool in_place) override;
  void set_shape(const std::optional<Shape>& shape) override { engine_->set_shape(shape); }

 private:
  Plan& plan(Memory memory) override {
    return memory == Memory::device ? gpu_plan_ : LocalCommunicator::plan(memory);
  }
  void do_run(Request& request) override;
  void do_run_pair(Request& request, int to, int from) override;
  std::shared_ptr<void> do_allocate(std::size_t bytes, Memory memory) override;
  AreaParts do_make_area(std::size_t bytes, int signals, const std::string& name,
                         const Explain& explain) override {
    return engine_->make_area(bytes, signals, name, explain);
  }
  std::shared_ptr<void> do_register(const MemoryRange& range) override;
  void do_end(Registration::State& one) override;
  Algorithm planned(const Request& request, const Args::Part& part) override;

  Algorithm choose_norm(std::size_t bytes) const;
  void run_on_gpu(Request& request, int to, int from);
  void run_messages_on_gpu(const Request& request);
  void enqueue(const Request& request, Algorithm algorithm, bool symmetric, int to = -1, int from = -1);
  void compare_places(const Request& request, bool symmetric);

  std::unique_ptr<cuda::Engine> engine_;
  Plan gpu_plan_;
};

}  // namespace unisono
