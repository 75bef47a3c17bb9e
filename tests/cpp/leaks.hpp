// What the address sanitizer is not to report: libfabric's tcp keeps a copy of the provider's description for
// every connection (1.17; shm, with the same calls of ours, leaves nothing).
#pragma once

#if defined(__SANITIZE_ADDRESS__)
extern "C" __attribute__((visibility("default"))) const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() { return "leak:libfabric"; }
#endif
