// The transports between nodes that Python makes.
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>

#include "bootstrap.hpp"
#include "loaded_mpi.hpp"
#include "module.hpp"
#include "python_transport.hpp"
#include "unisono/communicator.hpp"
#include "unisono/mpi_transport.hpp"

namespace unisono::python {

void PythonExchange::arrived(int peer) {
  const std::scoped_lock lock(mutex_);
  std::erase(peers_, peer);
}

void PythonExchange::awaits(int peer) {
  const std::scoped_lock lock(mutex_);
  if (std::find(peers_.begin(), peers_.end(), peer) == peers_.end()) peers_.push_back(peer);
}

void PythonExchange::end(TransportError error) {
  {
    const std::scoped_lock lock(mutex_);
    error_ = std::move(error);
  }
  complete();
}

bool PythonExchange::test() {
  if (!over_.load(std::memory_order_acquire)) return false;
  if (error_) throw TransportError(*error_);
  return true;
}

std::vector<int> PythonExchange::open() {
  const std::scoped_lock lock(mutex_);
  return peers_;
}

void PythonRecords::arrived(int source, std::span<const std::byte> record) {
  const std::scoped_lock lock(mutex_);
  arrived_.emplace_back(source, std::vector<std::byte>(record.begin(), record.end()));
}

void PythonRecords::sent(int to) {
  const std::scoped_lock lock(mutex_);
  if (std::size_t& count = under_way_[to]; count > 0) --count;
}

void PythonRecords::fail(int peer, const std::string& why) {
  const std::scoped_lock lock(mutex_);
  if (!error_) error_.emplace(peer, why);
}

bool PythonRecords::send(int to, std::span<const std::byte> head, std::span<const std::byte> data) {
  {
    const std::scoped_lock lock(mutex_);  // which nobody holds who waits for the GIL
    if (error_) throw TransportError(*error_);
    std::size_t& count = under_way_[to];
    if (count >= kMostUnderWay) return false;
    ++count;
  }
  const nb::gil_scoped_acquire gil;
  std::string record(reinterpret_cast<const char*>(head.data()), head.size());
  record.append(reinterpret_cast<const char*>(data.data()), data.size());
  (*transport_).attr("send_record")(to, nb::bytes(record.data(), record.size()));
  return true;
}

std::size_t PythonRecords::under_way(int to) {
  const std::scoped_lock lock(mutex_);
  if (error_) throw TransportError(*error_);
  return under_way_[to];
}

// Takes what came before a peer was lost too.
std::optional<int> PythonRecords::take(std::vector<std::byte>& record) {
  const std::scoped_lock lock(mutex_);
  if (arrived_.empty() && error_) throw TransportError(*error_);
  if (arrived_.empty()) return {};
  const int source = arrived_.front().first;
  record = std::move(arrived_.front().second);
  arrived_.pop_front();
  return source;
}

namespace {

struct SharedExchange final : Transport::Pending {
  explicit SharedExchange(std::shared_ptr<PythonExchange> shared) : exchange(std::move(shared)) {}
  bool test() override { return exchange->test(); }
  std::vector<int> open() override { return exchange->open(); }
  std::shared_ptr<PythonExchange> exchange;
};

nb::tuple message(int rank, const void* data, std::size_t bytes) {
  using Bytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>, nb::c_contig>;
  // a view, which may be used only while the exchange is under way
  return nb::make_tuple(
      rank, nb::cast(Bytes(const_cast<void*>(data), {bytes}, nb::handle()), nb::rv_policy::reference));
}

// MPI over a bootstrap's own communicator, which ends with the transport.
class OwnedMpi final : public Transport {
 public:
  OwnedMpi(std::unique_ptr<Transport> inner, nb::object owner)
      : inner_(std::move(inner)), owner_(hold(std::move(owner))) {}
  std::string name() const override { return inner_->name(); }
  std::unique_ptr<Pending> exchange(std::span<const Outgoing> sends,
                                    std::span<const Incoming> receives) override {
    return inner_->exchange(sends, receives);
  }
  Records* records() override { return inner_->records(); }
  void tell(const std::string& failure) noexcept override { inner_->tell(failure); }
  std::optional<std::string> heard() override { return inner_->heard(); }
  void close() noexcept override {
    inner_->close();
    const nb::gil_scoped_acquire gil;
    try {
      owner_->attr("close")();
    } catch (nb::python_error& error) { error.discard_as_unraisable("close"); }
  }

 private:
  std::unique_ptr<Transport> inner_;
  Held owner_;
};

std::shared_ptr<Transport> mpi_transport(const nb::object& owner) {
  const int rank = nb::cast<int>(owner.attr("rank")), size = nb::cast<int>(owner.attr("size"));
  const nb::module_ mpi = nb::module_::import_("mpi4py.MPI");
  std::unique_ptr<Transport> inner;
  if (nb::cast<std::size_t>(mpi.attr("_sizeof")(mpi.attr("Comm"))) == sizeof(int))
    inner = std::make_unique<MpiTransport<LoadedMpi<int>>>(LoadedMpi<int>(owner), rank, size);
  else inner = std::make_unique<MpiTransport<LoadedMpi<void*>>>(LoadedMpi<void*>(owner), rank, size);
  return std::make_shared<OwnedMpi>(std::move(inner), owner);
}

}  // namespace

PythonTransport::PythonTransport(nb::object object)
    : object_(hold(std::move(object))), name_(nb::cast<std::string>(object_->attr("name"))) {}

std::unique_ptr<Transport::Pending> PythonTransport::exchange(std::span<const Outgoing> sends,
                                                              std::span<const Incoming> receives) {
  const nb::gil_scoped_acquire gil;
  nb::list out, in;
  std::vector<int> peers;
  for (const Outgoing& one : sends) {
    out.append(message(one.to, one.data, one.bytes));
    peers.push_back(one.to);
  }
  for (const Incoming& one : receives) {
    in.append(message(one.from, one.data, one.bytes));
    peers.push_back(one.from);
  }
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  auto begun = std::make_shared<PythonExchange>(std::move(peers));
  object_->attr("exchange")(begun, out, in);
  return std::make_unique<SharedExchange>(std::move(begun));
}

Transport::Records* PythonTransport::records() {
  const nb::gil_scoped_acquire gil;
  if (!records_ && nb::hasattr(*object_, "send_record")) {
    records_ = std::make_shared<PythonRecords>(object_);
    object_->attr("carry")(records_);
  }
  return records_.get();
}

void PythonTransport::tell(const std::string& failure) noexcept {
  const nb::gil_scoped_acquire gil;
  try {
    object_->attr("tell")(failure);
  } catch (nb::python_error& error) { error.discard_as_unraisable("tell"); }
}

std::optional<std::string> PythonTransport::heard() {
  const nb::gil_scoped_acquire gil;
  const nb::object text = object_->attr("heard")();
  return text.is_none() ? std::nullopt : std::optional(nb::cast<std::string>(text));
}

void PythonTransport::close() noexcept {
  const nb::gil_scoped_acquire gil;
  try {
    object_->attr("close")();
  } catch (nb::python_error& error) { error.discard_as_unraisable("close"); }
}

std::function<std::shared_ptr<Transport>()> transport_factory(nb::object make) {
  if (make.is_none()) return {};
  return [make = hold(std::move(make))] {
    const nb::gil_scoped_acquire gil;
    nb::object made = (*make)();
    if (nb::isinstance<Transport>(made)) return nb::cast<std::shared_ptr<Transport>>(made);
    return std::shared_ptr<Transport>(std::make_shared<PythonTransport>(std::move(made)));
  };
}

void bind_transports(nb::module_& module) {
  using namespace nb::literals;
  // NOLINTNEXTLINE(bugprone-unused-raii): the module keeps it
  nb::class_<Transport>(module, "Transport", "Carries messages between nodes; see unisono.transport.");
  nb::class_<PythonExchange>(module, "Exchange",
                             "An exchange under way; see unisono.transport.Transport.exchange.")
      .def("complete", &PythonExchange::complete, "Says that all messages are complete.")
      .def("arrived", &PythonExchange::arrived, "peer"_a, "Says that the messages of one peer are complete.")
      .def("awaits", &PythonExchange::awaits, "peer"_a, "Says that a message of one peer is not complete.")
      .def("fail", &PythonExchange::fail, "peer"_a, "why"_a,
           "Ends the exchange: the peer is lost. why: the library's words.")
      .def("other_length", &PythonExchange::other_length, "peer"_a, "sent"_a, "expected"_a,
           "Ends the exchange: the peer's message has `sent` bytes instead of `expected`.");
  nb::class_<PythonRecords>(module, "Records",
                            "The records of a transport; see unisono.transport.RecordTransport.")
      .def(
          "arrived",
          [](PythonRecords& records, int source, const nb::bytes& record) {
            records.arrived(source, {static_cast<const std::byte*>(record.data()), record.size()});
          },
          "source"_a, "record"_a, "Says that a record has come.")
      .def("sent", &PythonRecords::sent, "to"_a,
           "Says that the oldest record to a rank needs this process no more.")
      .def("fail", &PythonRecords::fail, "peer"_a, "why"_a,
           "Says that a peer is lost. why: the library's words.");
  module.def("mpi_transport", &mpi_transport, "bootstrap"_a,
             "Returns a transport over the communicator of an MpiBootstrap, which ends with the transport.");
  module.def(
      "fabric_transport",
      [](nb::object bootstrap, double timeout_s) {
        PythonBootstrap meeting(std::move(bootstrap));
        const nb::gil_scoped_release released;
        return fabric_transport(meeting, {.timeout_s = timeout_s});
      },
      "bootstrap"_a, "timeout_s"_a, "Returns a transport of the fabric lane, over libfabric. Collective.");
}

}  // namespace unisono::python
