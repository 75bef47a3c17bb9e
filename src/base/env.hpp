// The settings in environment variables, read once.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace unisono {

struct Env {
  // UNISONO_TIMEOUT_S: deadline of every wait, in seconds.
  double timeout_s = 30;
  // UNISONO_CHECK=1: compare the ranks' calls before anything moves.
  bool check = false;
  // UNISONO_CHUNK_BYTES: size of a staging chunk; 0: by the number of ranks.
  std::size_t chunk_bytes = 0;
  // UNISONO_STREAM_BYTES: outputs of this size and more bypass the cache; 0: by the machine's cache.
  std::size_t stream_bytes = 0;
  // UNISONO_STREAM_CHUNKS: chunks bypass the cache, in rings alone, or not; unset: measured.
  std::optional<bool> stream_chunks;
  // UNISONO_FAR=0: never let the kernel copy between processes; stage instead.
  bool far = true;
  // UNISONO_SPINS: polls before a wait yields its core; -1: by ranks and cores.
  int spins = -1;
  // UNISONO_ISA: baseline, avx2 or avx512; empty: the best that the machine has.
  std::string instruction_set;

  // UNISONO_NODE: the name of this rank's node; empty: by the kernel's namespaces.
  std::string node;
  // UNISONO_TRANSPORT: the transport between nodes; empty: by the launcher that started the ranks.
  std::string transport;

  // UNISONO_MAX_SMS: the most SMs that a kernel may take; 0: as many as make it faster.
  int max_sms = 0;
  // UNISONO_CUDA_MEMORY=ipc: share GPU memory by cudaIpc handles; vmm: by descriptors.
  bool cuda_ipc = false;
  // UNISONO_PEER_ACCESS=0: GPUs never touch each other's memory; stage through the host's.
  bool peer_access = true;
  // UNISONO_MOE_LOW_LATENCY=0: a moe of few tokens takes the kernels for many. The same on every rank.
  bool moe_low_latency = true;
  // UNISONO_SHARE_DEVICE=1: let ranks have the same GPU, for tests.
  bool share_device = false;

  // UNISONO_FABRIC_PROVIDER: libfabric's name of a provider; empty: its best between machines.
  std::string fabric_provider;
  // UNISONO_FABRIC_CHANNELS: endpoints of a rank; 0: one for each NIC.
  int fabric_channels = 0;
  // UNISONO_FABRIC_SHARE: the fewest bytes of a split transfer for one channel; 0: by the NICs.
  std::size_t fabric_share = 0;
  // UNISONO_FABRIC_COMPLETIONS: entries of a completion queue; 0: by the NIC.
  std::size_t fabric_completions = 0;
  // MASTER_ADDR: rank 0's host, by which a software provider over IP finds its interface; empty: not known.
  std::string master_address;
  // UNISONO_LIBFABRIC: the library's file; empty: the one that the build found.
  std::string libfabric;

  // UNISONO_NCCL: the library's file; empty: libnccl.so.2, else that of pip's package beside this one.
  std::string nccl;
};

// Returns the settings. Throws UsageError, which names the variable, if a value cannot be read.
const Env& env();

}  // namespace unisono
