#include "mpi_engine.hpp"

#include <dlfcn.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "unisono/error.hpp"

namespace unisono::python {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSpinning =
    std::chrono::microseconds(200);  // how long a wait keeps its core, where there are enough
constexpr auto kYielding =
    std::chrono::milliseconds(5);  // how long it only yields it; then it sleeps between polls
constexpr auto kNap = std::chrono::microseconds(100);
constexpr auto kLook = std::chrono::milliseconds(5);
// What the time from one look to the next counts at the most: a process that was stopped has not waited.
constexpr Clock::duration kMostCounted = std::chrono::milliseconds(200);
constexpr int kTag = 1;
constexpr std::size_t kMostBytes = std::size_t{1} << 30;  // of a message: MPI counts in ints
constexpr std::size_t kMostLetters = 8192;                // of an error's text: more than any MPI's maximum

}  // namespace

// MPI's functions, and what differs between MPIs: a handle is an int or a pointer. Both are passed as a word,
// of which the function takes its part; in memory each has its own size.
class MpiEngine::Library {
 public:
  explicit Library(nb::handle mpi)
      : byte(handle(mpi, mpi.attr("BYTE"))),
        request_bytes(nb::cast<std::size_t>(mpi.attr("_sizeof")(mpi.attr("Request")))),
        status_bytes(nb::cast<std::size_t>(mpi.attr("_sizeof")(mpi.attr("Status")))),
        truncated(nb::cast<int>(mpi.attr("ERR_TRUNCATE"))) {
    const nb::object file = mpi.attr("__file__");
    void* library = ::dlopen(nb::cast<const char*>(file), RTLD_NOW | RTLD_NOLOAD);
    find(library, "MPI_Isend", isend);
    find(library, "MPI_Irecv", irecv);
    find(library, "MPI_Test", test);
    find(library, "MPI_Get_count", get_count);
    find(library, "MPI_Error_class", error_class);
    find(library, "MPI_Error_string", error_string);
  }

  static Handle handle(nb::handle mpi, nb::handle object) {
    const auto address = nb::cast<std::uintptr_t>(mpi.attr("_addressof")(object));
    const auto bytes = nb::cast<std::size_t>(mpi.attr("_sizeof")(object));
    Handle value = 0;
    std::memcpy(&value, reinterpret_cast<const void*>(address), bytes);  // NOLINT(performance-no-int-to-ptr)
    return value;
  }

  bool is_truncated(int code) const {
    int its = code;
    error_class(code, &its);
    return its == truncated;
  }
  std::string text(int code) const {
    std::string text(kMostLetters, '\0');
    int length = 0;
    error_string(code, text.data(), &length);
    text.resize(static_cast<std::size_t>(length));
    return text;
  }

  const Handle byte;
  const std::size_t request_bytes, status_bytes;
  const int truncated;
  int (*isend)(const void*, int, Handle, int, int, Handle, void*) = nullptr;
  int (*irecv)(void*, int, Handle, int, int, Handle, void*) = nullptr;
  int (*test)(void*, int*, void*) = nullptr;
  int (*get_count)(const void*, Handle, int*) = nullptr;
  int (*error_class)(int, int*) = nullptr;
  int (*error_string)(int, char*, int*) = nullptr;

 private:
  template <class Function>
  static void find(void* library, const char* name, Function& function) {
    function = library ? reinterpret_cast<Function>(::dlsym(library, name)) : nullptr;
    if (!function)
      throw ResourceError(std::string("mpi4py's MPI has no ") + name +
                          ": install mpi4py 4.1 or newer, or set UNISONO_ENGINE=gloo.");
  }
};

// Messages that have been begun, receives first.
class MpiEngine::Exchange {
 public:
  struct Message {
    int rank, bytes;
    bool receive;
  };
  std::vector<Message> messages;
  std::vector<std::byte> requests;
  std::size_t ended = 0;  // from the first on
  nb::object memory;
};

MpiEngine::MpiEngine(nb::handle communicator, int rank, std::vector<std::string> names, double timeout_s,
                     bool crowded, std::function<void()> look)
    : names_(std::move(names)),
      me_(names_.at(static_cast<std::size_t>(rank))),
      timeout_(timeout_s),
      crowded_(crowded),
      look_(std::move(look)) {
  const nb::module_ mpi = nb::module_::import_("mpi4py.MPI");
  library_ = std::make_unique<const Library>(mpi);
  communicator_ = Library::handle(mpi, communicator);
  status_.resize(library_->status_bytes);
}

MpiEngine::~MpiEngine() { close(); }

MpiEngine::Exchange& MpiEngine::begin(std::span<const Part> sends, std::span<const Part> receives,
                                      nb::object memory) {
  if (spare_.empty()) spare_.push_back(std::make_unique<Exchange>());
  Exchange& exchange = *open_.emplace_back(std::move(spare_.back()));
  spare_.pop_back();
  exchange.messages.clear();
  exchange.ended = 0;
  exchange.memory = std::move(memory);
  std::size_t count = 0;
  for (const auto& parts : {receives, sends})
    for (const Part& part : parts) count += (part.bytes + kMostBytes - 1) / kMostBytes;
  exchange.requests.resize(count * library_->request_bytes);

  const nb::gil_scoped_release released;
  auto post = [&](const Part& part, bool receive) {
    for (std::size_t begin = 0; begin < part.bytes; begin += kMostBytes) {
      const int bytes = static_cast<int>(std::min(part.bytes - begin, kMostBytes));
      void* its = request(exchange, exchange.messages.size());
      const int code = receive ? library_->irecv(part.data + begin, bytes, library_->byte, part.rank, kTag,
                                                 communicator_, its)
                               : library_->isend(part.data + begin, bytes, library_->byte, part.rank, kTag,
                                                 communicator_, its);
      if (code != 0)
        throw PeerLostError("MPI could not begin an exchange between nodes: " + library_->text(code));
      exchange.messages.push_back({part.rank, bytes, receive});
    }
  };
  for (const Part& part : receives) post(part, true);
  for (const Part& part : sends) post(part, false);
  return exchange;
}

void MpiEngine::wait(Exchange& exchange) {
  {
    const nb::gil_scoped_release released;
    const auto began = Clock::now();
    auto looked = began;
    Clock::duration waited{};
    while (!test(exchange)) {
      const auto now = Clock::now();
      if (now - began < kSpinning && !crowded_) continue;
      if (now - began < kYielding) ::sched_yield();
      else std::this_thread::sleep_for(kNap);
      if (now - looked < kLook) continue;
      look_();
      waited += std::min(now - looked, kMostCounted);
      looked = now;
      if (waited > timeout_) late(exchange);
    }
  }
  exchange.memory.reset();
  const auto its =
      std::find_if(open_.begin(), open_.end(), [&](const auto& one) { return one.get() == &exchange; });
  if (its == open_.end()) return;  // closed by a signal's handler meanwhile
  spare_.push_back(std::move(*its));
  open_.erase(its);
}

bool MpiEngine::test(Exchange& exchange) {
  for (; exchange.ended < exchange.messages.size(); ++exchange.ended) {
    const Exchange::Message& message = exchange.messages[exchange.ended];
    int ended = 0;
    if (const int code = library_->test(request(exchange, exchange.ended), &ended, status_.data())) {
      if (message.receive && library_->is_truncated(code)) other_length(message.rank, "more", message.bytes);
      throw PeerLostError("MPI lost the way between " + me_ + " and " + name(message.rank) + ": " +
                          library_->text(code));
    }
    if (!ended) return false;
    int got = message.bytes;
    if (message.receive) library_->get_count(status_.data(), library_->byte, &got);
    if (got != message.bytes) other_length(message.rank, std::to_string(got) + " bytes", message.bytes);
  }
  return true;
}

void MpiEngine::other_length(int rank, const std::string& sent, int expected) const {
  throw Error(name(rank) + " sent " + sent + " where " + me_ + " expects " + std::to_string(expected) +
              " bytes: make the same call on every rank (UNISONO_CHECK=1 compares them).");
}

void MpiEngine::late(Exchange& exchange) {
  std::set<int> open;
  for (std::size_t i = exchange.ended; i < exchange.messages.size(); ++i) {
    int ended = 0;
    library_->test(request(exchange, i), &ended, status_.data());
    if (!ended) open.insert(exchange.messages[i].rank);
  }
  std::string peers;
  for (const int rank : open) peers += (peers.empty() ? "" : ", ") + name(rank);
  std::ostringstream text;
  text << me_ << " has waited " << timeout_.count() << " s for " << (peers.empty() ? "its peers" : peers)
       << " over MPI: see what that rank and the link between the nodes are doing, or raise "
          "UNISONO_TIMEOUT_S.";
  throw TimeoutError(text.str());
}

bool MpiEngine::close() {
  static auto& kept = *new std::vector<std::unique_ptr<Exchange>>;  // never destroyed, as its Python objects
  const bool any = !open_.empty();
  std::move(open_.begin(), open_.end(), std::back_inserter(kept));
  open_.clear();
  return any;
}

const std::string& MpiEngine::name(int rank) const { return names_[static_cast<std::size_t>(rank)]; }

void* MpiEngine::request(Exchange& exchange, std::size_t index) const {
  return exchange.requests.data() + index * library_->request_bytes;
}

}  // namespace unisono::python
