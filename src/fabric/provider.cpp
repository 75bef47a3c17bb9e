#include "fabric/provider.hpp"

#include <netdb.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

#include "base/env.hpp"
#include "fabric/library.hpp"
#include "unisono/error.hpp"

namespace unisono::fabric {
namespace {

Info owned(fi_info* info) { return {info, library().freeinfo}; }

// Returns the entries that libfabric has for the lane's needs. Empty `name`: of every provider.
Info offered(const std::string& name, bool device) {
  const std::shared_ptr<fi_info> hints(library().dupinfo(nullptr), library().freeinfo);
  if (!hints) throw ResourceError("there is no memory to ask libfabric for its providers.");
  hints->caps = FI_RMA | FI_WRITE | FI_REMOTE_WRITE | (device ? FI_HMEM : 0);
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY |
                                FI_MR_ENDPOINT | (device ? FI_MR_HMEM : 0);
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  if (!name.empty()) hints->fabric_attr->prov_name = ::strdup(name.c_str());
  fi_info* found = nullptr;
  const int code = library().getinfo(FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION), nullptr, nullptr, 0,
                                     hints.get(), &found);
  if (code == -FI_ENODATA) return nullptr;
  checked(code, "asking libfabric for its providers");
  return owned(found);
}

bool same(std::string_view asked, std::string_view has) {
  return asked == has || (asked == "tcp" && has == "net") || (asked == "net" && has == "tcp");
}

std::string ip_text(const sockaddr* address, socklen_t size) {
  char text[NI_MAXHOST];
  if (::getnameinfo(address, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) return {};
  return text;
}

std::string source_of(const fi_info& one) {
  return ip_of(one, {static_cast<const char*>(one.src_addr), one.src_addrlen});
}

// Returns whether a provider is software over IP. Such a one takes every address of this machine for a NIC,
// also that of a bridge that leads nowhere.
bool over_ip(const fi_info& one) { return !one.nic && !source_of(one).empty(); }

void add(std::vector<Provider>& known, const fi_info& one) {
  const std::string name = one.fabric_attr->prov_name;
  if (one.domain_attr->cq_data_size < sizeof(std::uint32_t)) return;
  auto found = std::find_if(known.begin(), known.end(), [&](const Provider& p) { return p.name == name; });
  if (found == known.end()) {
    found = known.emplace(known.end());
    found->name = name;
  }
  const std::string_view nic = one.domain_attr->name;
  for (const Info& other : found->nics)
    if ((nic == other->domain_attr->name && !over_ip(one)) || one.addr_format != other->addr_format) return;
  found->nics.push_back(owned(library().dupinfo(&one)));
  found->one_machine = name.starts_with("shm") || name.starts_with("sm2");
  found->datagrams = name.ends_with("ofi_rxd");
}

// Returns the addresses that the kernel sends from, best first: to rank 0's host, then to any network.
std::vector<std::string> kernels_choice() {
  std::vector<std::string> chosen;
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  // the last two belong to no host (RFC 5737, 3849): the default route is asked for them
  for (const char* host : {env().master_address.c_str(), "192.0.2.1", "2001:db8::1"}) {
    addrinfo* found = nullptr;
    if (!*host || ::getaddrinfo(host, "9", &hints, &found) != 0) continue;
    for (const addrinfo* one = found; one; one = one->ai_next) {
      const int probe = ::socket(one->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
      if (probe < 0) continue;
      sockaddr_storage own{};
      socklen_t size = sizeof own;
      if (::connect(probe, one->ai_addr, one->ai_addrlen) == 0 &&  // sends nothing
          ::getsockname(probe, reinterpret_cast<sockaddr*>(&own), &size) == 0)
        chosen.push_back(ip_text(reinterpret_cast<const sockaddr*>(&own), size));
      ::close(probe);
    }
    ::freeaddrinfo(found);
  }
  return chosen;
}

const Info& way_out(const std::vector<Info>& nics, const std::vector<std::string>& chosen) {
  for (const std::string& address : chosen)
    for (const Info& nic : nics)
      if (source_of(*nic) == address) return nic;
  return nics.front();
}

// The result of kernels_choice(), once it was needed: the look-up of a name there may take long.
using Chosen = std::optional<std::vector<std::string>>;
void finish(Provider& provider, Chosen& chosen) {
  auto loopback = [](const Info& nic) { return std::string_view(nic->domain_attr->name) == "lo"; };
  if (!std::all_of(provider.nics.begin(), provider.nics.end(), loopback))
    std::erase_if(provider.nics, loopback);
  if (provider.nics.size() > 1 && over_ip(*provider.nics.front())) {
    if (!chosen) chosen = kernels_choice();
    provider.nics = {way_out(provider.nics, *chosen)};
  }
  std::size_t channels = 0;
  for (const Info& nic : provider.nics)
    channels += std::min<std::size_t>(nic->domain_attr->ep_cnt, kMostChannels);
  provider.most_channels = static_cast<int>(std::min<std::size_t>(channels, kMostChannels));
  const fi_info& first = *provider.nics.front();
  if (first.nic && first.nic->link_attr && first.nic->link_attr->speed > 0)
    provider.line_gbps = static_cast<double>(first.nic->link_attr->speed) / 1e9;
}

std::vector<Provider> found_by(const std::string& name, bool device) {
  std::vector<Provider> known;
  const Info offers = offered(name, device);
  for (const fi_info* one = offers.get(); one; one = one->next) add(known, *one);
  return known;
}

Provider finished(Provider provider) {
  Chosen chosen;
  finish(provider, chosen);
  return provider;
}

}  // namespace

std::string ip_of(const fi_info& nic, std::string_view address) {
  if (nic.addr_format != FI_SOCKADDR_IN && nic.addr_format != FI_SOCKADDR_IN6) return {};
  return ip_text(reinterpret_cast<const sockaddr*>(address.data()), static_cast<socklen_t>(address.size()));
}

std::vector<Provider> providers(bool device) {
  auto known = found_by("", device);
  Chosen chosen;
  for (Provider& provider : known) finish(provider, chosen);
  return known;
}

Provider provider_named(const std::string& name, bool device) {
  const auto known = found_by("", device);
  auto named = [&](std::string_view wanted) {
    return std::find_if(known.begin(), known.end(), [&](const Provider& p) { return same(wanted, p.name); });
  };
  auto found = name.empty() ? std::find_if(known.begin(), known.end(),
                                           [](const Provider& p) { return !p.one_machine; })
                            : named(name);
  // 1.17 puts messages over tcp first; tcp itself has less to do
  if (name.empty() && found != known.end() && found->name == "tcp;ofi_rxm" && named("tcp") != known.end())
    found = named("tcp");
  if (found != known.end()) return finished(*found);
  if (!name.empty())  // libfabric gives some providers only to those who name them
    for (const Provider& provider : found_by(name, device))
      if (same(name, provider.name)) return finished(provider);
  std::string present;
  for (const Provider& provider : known) present += (present.empty() ? "" : ", ") + provider.name;
  throw UsageError((name.empty() ? std::string("libfabric has no provider that reaches other machines")
                                 : "libfabric has no provider '" + name + "' with remote writes") +
                   (device ? " of GPU memory" : "") + " here: " +
                   (present.empty() ? "install one of its providers." : "use one of " + present + "."));
}

}  // namespace unisono::fabric
