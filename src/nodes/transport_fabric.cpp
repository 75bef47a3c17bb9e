// Messages between nodes by the fabric lane.
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <stop_token>
#include <thread>
#include <vector>

#include "base/failure.hpp"
#include "core/backend.hpp"
#include "fabric/communicator.hpp"
#include "fabric/records.hpp"
#include "unisono/communicator.hpp"

namespace unisono::nodes {
namespace {

// Up to here an exchange is over before a thread of its own would have begun it.
constexpr std::size_t kAtOnceBytes = 256 << 10;

// An exchange is a batch_send_recv. A large one goes in a thread of its own, so that the caller can combine
// meanwhile.
class FabricTransport final : public Transport {
 public:
  FabricTransport(std::unique_ptr<Communicator::Impl> comm, std::unique_ptr<fabric::Records> records)
      : comm_(std::move(comm)), records_(std::move(records)) {}
  ~FabricTransport() override { close(); }

  std::string name() const override { return "the fabric"; }
  Records* records() override { return records_.get(); }
  void tell(const std::string& failure) noexcept override { records_->tell(failure); }
  std::optional<std::string> heard() override { return records_->heard(); }

  std::unique_ptr<Pending> exchange(std::span<const Outgoing> sends,
                                    std::span<const Incoming> receives) override {
    auto job = std::make_shared<Job>();
    job->sends.assign(sends.begin(), sends.end());
    job->receives.assign(receives.begin(), receives.end());
    std::unique_lock lock(mutex_);
    if (queue_.empty() && !busy_ && job->bytes() <= kAtOnceBytes) {
      lock.unlock();
      run(*job);
    } else {
      queue_.push_back(job);
      changed_.notify_one();
    }
    return std::make_unique<Exchange>(*this, std::move(job));
  }

  void close() noexcept override {
    comm_->close();  // ends the worker's call
    records_->close();
    worker_.request_stop();
  }

 private:
  struct Job {
    std::vector<Outgoing> sends;
    std::vector<Incoming> receives;
    std::exception_ptr thrown;
    std::atomic<bool> over = false;

    std::size_t bytes() const {
      std::size_t all = 0;
      for (const auto& one : sends) all += one.bytes;
      for (const auto& one : receives) all += one.bytes;
      return all;
    }
    std::vector<int> peers() const {
      std::vector<int> ranks;
      for (const auto& one : sends) ranks.push_back(one.to);
      for (const auto& one : receives) ranks.push_back(one.from);
      std::sort(ranks.begin(), ranks.end());
      ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
      return ranks;
    }
  };

  class Exchange final : public Pending {
   public:
    Exchange(FabricTransport& transport, std::shared_ptr<Job> job)
        : transport_(transport), job_(std::move(job)) {}
    // The caller's memory may go when this has been destroyed: the worker's call must not touch it any more.
    ~Exchange() override {
      if (job_->over) return;
      transport_.close();
      while (!job_->over && transport_.worker_.joinable()) std::this_thread::yield();
    }
    bool test() override {
      if (!job_->over) return false;
      if (job_->thrown) std::rethrow_exception(job_->thrown);
      return true;
    }
    std::vector<int> open() override { return job_->over ? std::vector<int>{} : job_->peers(); }

   private:
    FabricTransport& transport_;
    std::shared_ptr<Job> job_;
  };

  void run(Job& job) noexcept {
    try {
      const Call call{.dtype = DType::u8};
      comm_->run({call, comm_->rank(), comm_->size(), job.sends, job.receives});
    } catch (...) { job.thrown = std::current_exception(); }
    job.over = true;
  }

  void work(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (changed_.wait(lock, stop, [&] { return !queue_.empty(); }) || !queue_.empty()) {
      const auto job = queue_.front();
      queue_.pop_front();
      busy_ = true;
      lock.unlock();
      run(*job);
      lock.lock();
      busy_ = false;
    }
  }

  std::unique_ptr<Communicator::Impl> comm_;
  std::unique_ptr<fabric::Records> records_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<std::shared_ptr<Job>> queue_;
  bool busy_ = false;
  std::jthread worker_{[this](const std::stop_token& stop) { work(stop); }};
};

}  // namespace

}  // namespace unisono::nodes

std::shared_ptr<unisono::Transport> unisono::fabric_transport(Bootstrap& bootstrap,
                                                              const Communicator::Options& options) {
  // An exchange hears of failures among the records too: its peer may never begin it.
  const auto hear = std::make_shared<std::function<void()>>();
  const Communicator::Options own{.timeout_s = options.timeout_s,
                                  .check = false,
                                  .fabric = Communicator::Fabric{},
                                  .while_waiting = [hear] {
                                    if (*hear) (*hear)();
                                  }};
  auto comm = fabric::make_communicator(bootstrap, own);
  auto records = fabric::make_records(bootstrap, own.timeout_s.value_or(default_timeout_s()));
  *hear = [at = comm.get(), heard = records.get()] {
    if (const auto failure = heard->heard()) at->fail(failure_told(*failure));
  };
  return std::make_shared<nodes::FabricTransport>(std::move(comm), std::move(records));
}
