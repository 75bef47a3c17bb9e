// The providers of libfabric on this machine that the lane can use: reliable unconnected endpoints with
// remote writes whose 32 bits of immediate data arrive at the receiver.
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
  std::vector<Info> nics;           // an entry for each NIC; over IP in software one, the way to others
  int most_channels = 0;            // endpoints, of all NICs together
  std::optional<double> line_gbps;  // Gbit/s of one NIC, if it says
  bool one_machine = false;         // reaches no other machine
  bool datagrams = false;           // sends may be lost, and are repeated while the rank looks
};

// Returns the providers, in libfabric's order, best first. device: only those that write GPU memory too.
std::vector<Provider> providers(bool device = false);

// Returns the IP address, as text, in the address of an endpoint of that NIC. Empty: a NIC without IP.
std::string ip_of(const fi_info& nic, std::string_view address);

// Returns the provider of that name; tcp and net are one (renamed in libfabric 1.18). Empty: the first that
// reaches other machines. Throws UsageError, which lists the present ones, if there is none.
Provider provider_named(const std::string& name, bool device = false);

}  // namespace unisono::fabric
