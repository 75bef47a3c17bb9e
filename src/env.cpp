#include "env.hpp"

#include <cmath>
#include <cstdlib>

#include "unisono/error.hpp"

namespace unisono {
namespace {

const char* value_of(const char* name) {
  const char* value = std::getenv(name);
  return value && *value ? value : nullptr;
}

double number(const char* name, double otherwise, double least) {
  const char* value = value_of(name);
  if (!value) return otherwise;
  char* end = nullptr;
  const double read = std::strtod(value, &end);
  if (*end != '\0' || !std::isfinite(read) || read < least)
    throw UsageError(std::string(name) + "=" + value + " is not a number of at least " +
                     std::to_string(least) + ": set it to one, or unset it.");
  return read;
}

Env read() {
  Env env;
  env.timeout_s = number("UNISONO_TIMEOUT_S", env.timeout_s, 0.001);
  env.check = number("UNISONO_CHECK", 0, 0) != 0;
  env.chunk_bytes = static_cast<std::size_t>(number("UNISONO_CHUNK_BYTES", 0, 0));
  env.stream_bytes = static_cast<std::size_t>(number("UNISONO_STREAM_BYTES", 0, 0));
  if (const double given = number("UNISONO_STREAM_CHUNKS", -1, -1); given >= 0)
    env.stream_chunks = given != 0;
  env.far = number("UNISONO_FAR", 1, 0) != 0;
  env.spins = static_cast<int>(number("UNISONO_SPINS", -1, -1));
  env.max_sms = static_cast<int>(number("UNISONO_MAX_SMS", 0, 0));
  env.peer_access = number("UNISONO_PEER_ACCESS", 1, 0) != 0;
  env.share_device = number("UNISONO_SHARE_DEVICE", 0, 0) != 0;
  env.fabric_channels = static_cast<int>(number("UNISONO_FABRIC_CHANNELS", 0, 0));
  env.fabric_share = static_cast<std::size_t>(number("UNISONO_FABRIC_SHARE", 0, 0));
  env.fabric_completions = static_cast<std::size_t>(number("UNISONO_FABRIC_COMPLETIONS", 0, 0));
  if (const char* provider = value_of("UNISONO_FABRIC_PROVIDER")) env.fabric_provider = provider;
  if (const char* file = value_of("UNISONO_LIBFABRIC")) env.libfabric = file;
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
