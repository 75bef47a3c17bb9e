// What libfabric offers on this machine that the lane can use: reliable unconnected endpoints with remote
// writes whose immediate data of 32 bits arrives at the receiver.
#pragma once

#include <rdma/fabric.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace unisono::fabric {

inline constexpr int kMostChannels = 64;

using Info = std::shared_ptr<const fi_info>;

struct Provider {
  std::string name;                 // libfabric's
  std::vector<Info> nics;           // an entry of each NIC; of software over IP, that of the way to others
  int most_channels = 0;            // endpoints, of all NICs together
  std::optional<double> line_gbps;  // Gbit/s of one NIC, where it says
  bool one_machine = false;         // it reaches no other
  bool datagrams = false;           // what it sends may be lost; it is sent again while its rank looks
};

// Of host memory or, `device`, of GPU memory too. In libfabric's order, best first.
std::vector<Provider> providers(bool device = false);

// The IP address, as text, in the address of an endpoint of that NIC; empty where the NIC's are others.
std::string ip_of(const fi_info& nic, std::string_view address);

// The provider of that name; tcp and net are one (it was renamed in libfabric 1.18). Empty: the first that
// reaches other machines. Throws UsageError, which lists those present.
Provider provider_named(const std::string& name, bool device = false);

}  // namespace unisono::fabric
