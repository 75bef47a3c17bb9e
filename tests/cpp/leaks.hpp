// Keeps the address sanitizer from reporting libfabric: its tcp keeps a copy of the provider's description
// for every connection (1.17; after the same calls, its shm leaves nothing).
#pragma once

#if defined(__SANITIZE_ADDRESS__)
extern "C" __attribute__((visibility("default"))) const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() { return "leak:libfabric"; }
#endif
