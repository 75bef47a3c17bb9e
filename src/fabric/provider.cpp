#include "fabric/provider.hpp"

#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

#include <algorithm>
#include <string_view>

#include "fabric/library.hpp"
#include "unisono/error.hpp"

namespace unisono::fabric {
namespace {

Info owned(fi_info* info) { return {info, library().freeinfo}; }

// What the lane asks for; `name` empty: of every provider.
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
    if (nic == other->domain_attr->name || one.addr_format != other->addr_format) return;
  found->nics.push_back(owned(library().dupinfo(&one)));
  found->one_machine = name.starts_with("shm") || name.starts_with("sm2");
  found->datagrams = name.ends_with("ofi_rxd");
}

void finish(Provider& provider) {
  auto loopback = [](const Info& nic) { return std::string_view(nic->domain_attr->name) == "lo"; };
  if (!std::all_of(provider.nics.begin(), provider.nics.end(), loopback))
    std::erase_if(provider.nics, loopback);
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
  for (Provider& provider : known) finish(provider);
  return known;
}

}  // namespace

std::vector<Provider> providers(bool device) { return found_by("", device); }

Provider provider_named(const std::string& name, bool device) {
  const auto known = providers(device);
  auto named = [&](std::string_view wanted) {
    return std::find_if(known.begin(), known.end(), [&](const Provider& p) { return same(wanted, p.name); });
  };
  auto found = name.empty() ? std::find_if(known.begin(), known.end(),
                                           [](const Provider& p) { return !p.one_machine; })
                            : named(name);
  // 1.17 puts messages over tcp first; tcp itself has less to do
  if (name.empty() && found != known.end() && found->name == "tcp;ofi_rxm" && named("tcp") != known.end())
    found = named("tcp");
  if (found != known.end()) return *found;
  if (!name.empty())  // some are only given to those who name them
    for (const Provider& provider : found_by(name, device))
      if (same(name, provider.name)) return provider;
  std::string present;
  for (const Provider& provider : known) present += (present.empty() ? "" : ", ") + provider.name;
  throw UsageError((name.empty() ? std::string("libfabric has no provider that reaches other machines")
                                 : "libfabric has no provider '" + name + "' with remote writes") +
                   (device ? " of GPU memory" : "") + " here: " +
                   (present.empty() ? "install one of its providers." : "use one of " + present + "."));
}

}  // namespace unisono::fabric
