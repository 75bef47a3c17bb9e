#include "base/env.hpp"

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string_view>

#include "unisono/error.hpp"

namespace unisono {
namespace {

const char* value_of(const char* name) {
  const char* value = std::getenv(name);
  return value && *value ? value : nullptr;
}

[[noreturn]] void refuse(const char* name, const char* value, const std::string& why) {
  throw UsageError(std::string(name) + "=" + value + " " + why);
}

double seconds(const char* name, double otherwise) {
  const char* value = value_of(name);
  if (!value) return otherwise;
  char* end = nullptr;
  const double read = std::strtod(value, &end);
  if (*end != '\0' || !std::isfinite(read) || read < 0.001)
    refuse(name, value, "is not a number of seconds from 0.001 on: set it to one, or unset it.");
  return read;
}

std::optional<bool> flag(const char* name) {
  const char* value = value_of(name);
  if (!value) return {};
  const std::string_view read(value);
  if (read != "0" && read != "1")
    refuse(name, value, "is neither 0 nor 1: set 0 to turn it off, 1 to turn it on.");
  return read == "1";
}

// Returns the whole number in a variable; if it is unset, `least`, which leaves the choice to the library.
template <class Whole>
Whole whole(const char* name, Whole least, Whole most = std::numeric_limits<Whole>::max()) {
  const char* value = value_of(name);
  if (!value) return least;
  const char* const end = value + std::strlen(value);
  Whole read{};
  if (const auto [last, error] = std::from_chars(value, end, read);
      last != end || error != std::errc() || read < least || read > most)
    refuse(name, value,
           "is not a whole number from " + std::to_string(least) + " to " + std::to_string(most) +
               ": set it to one, or unset it.");
  return read;
}

Env read() {
  Env env;
  env.timeout_s = seconds("UNISONO_TIMEOUT_S", env.timeout_s);
  env.check = flag("UNISONO_CHECK").value_or(env.check);
  env.chunk_bytes = whole("UNISONO_CHUNK_BYTES", env.chunk_bytes, std::size_t{1} << 30);
  env.stream_bytes = whole("UNISONO_STREAM_BYTES", env.stream_bytes);
  env.stream_chunks = flag("UNISONO_STREAM_CHUNKS");
  env.far = flag("UNISONO_FAR").value_or(env.far);
  env.spins = whole("UNISONO_SPINS", env.spins);
  env.max_sms = whole("UNISONO_MAX_SMS", env.max_sms);
  env.peer_access = flag("UNISONO_PEER_ACCESS").value_or(env.peer_access);
  env.moe_low_latency = flag("UNISONO_MOE_LOW_LATENCY").value_or(env.moe_low_latency);
  env.share_device = flag("UNISONO_SHARE_DEVICE").value_or(env.share_device);
  env.fabric_channels = whole("UNISONO_FABRIC_CHANNELS", env.fabric_channels);
  env.fabric_share = whole("UNISONO_FABRIC_SHARE", env.fabric_share);
  env.fabric_completions = whole("UNISONO_FABRIC_COMPLETIONS", env.fabric_completions);
  if (const char* provider = value_of("UNISONO_FABRIC_PROVIDER")) env.fabric_provider = provider;
  if (const char* host = value_of("MASTER_ADDR")) env.master_address = host;
  if (const char* file = value_of("UNISONO_LIBFABRIC")) env.libfabric = file;
  if (const char* node = value_of("UNISONO_NODE")) env.node = node;
  if (const char* transport = value_of("UNISONO_TRANSPORT")) env.transport = transport;
  if (const char* file = value_of("UNISONO_NCCL")) env.nccl = file;
  if (const char* memory = value_of("UNISONO_CUDA_MEMORY")) {
    const std::string_view kind(memory);
    if (kind != "vmm" && kind != "ipc")
      throw UsageError("UNISONO_CUDA_MEMORY=" + std::string(kind) + " is unknown: use vmm or ipc.");
    env.cuda_ipc = kind == "ipc";
  }
  if (const char* isa = value_of("UNISONO_ISA")) env.instruction_set = isa;
  return env;
}

}  // namespace

const Env& env() {
  static const Env once = read();
  return once;
}

}  // namespace unisono
