#include <condition_variable>
#include <mutex>

#include "unisono/bootstrap.hpp"
#include "unisono/error.hpp"

namespace unisono {
namespace {

struct Meeting {
  explicit Meeting(int size) : gathering(static_cast<std::size_t>(size)) {}
  std::mutex mutex;
  std::condition_variable complete;
  std::vector<std::string> gathering, gathered;
  std::size_t arrived = 0;
  std::size_t round = 0;
};

class ThreadBootstrap final : public Bootstrap {
 public:
  ThreadBootstrap(std::shared_ptr<Meeting> meeting, int rank, std::chrono::duration<double> timeout)
      : meeting_(std::move(meeting)), rank_(rank), timeout_(timeout) {}
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(meeting_->gathering.size()); }

  std::vector<std::string> all_gather(const std::string& data) override {
    std::unique_lock lock(meeting_->mutex);
    const std::size_t round = meeting_->round;
    meeting_->gathering[static_cast<std::size_t>(rank_)] = data;
    if (++meeting_->arrived == meeting_->gathering.size()) {
      meeting_->gathered = meeting_->gathering;
      meeting_->arrived = 0;
      ++meeting_->round;
      meeting_->complete.notify_all();
    } else {
      if (!meeting_->complete.wait_for(lock, timeout_, [&] { return meeting_->round != round; }))
        throw TimeoutError(
            "rank " + std::to_string(rank_) + " waited " + std::to_string(timeout_.count()) +
            " s for the other threads to create their communicators: call it on every rank's thread.");
    }
    return meeting_->gathered;
  }

 private:
  std::shared_ptr<Meeting> meeting_;
  int rank_;
  std::chrono::duration<double> timeout_;
};

}  // namespace

std::vector<std::shared_ptr<Bootstrap>> thread_bootstraps(int size, std::chrono::duration<double> timeout) {
  if (size < 1) throw UsageError("a communicator has at least one rank, not " + std::to_string(size) + ".");
  auto meeting = std::make_shared<Meeting>(size);
  std::vector<std::shared_ptr<Bootstrap>> ranks;
  for (int rank = 0; rank < size; ++rank)
    ranks.push_back(std::make_shared<ThreadBootstrap>(meeting, rank, timeout));
  return ranks;
}

}  // namespace unisono
