// The version of these headers. CMakeLists.txt and pyproject.toml read it here. C may include it.
#pragma once

#define UNISONO_VERSION_MAJOR 0
#define UNISONO_VERSION_MINOR 1
#define UNISONO_VERSION_PATCH 0

// Marks what libunisono.so exports. Everything else in it is hidden (cmake/exports.txt lists the result).
#define UNISONO_API __attribute__((visibility("default")))

#ifdef __cplusplus
namespace unisono {

// The version of the headers that a program is compiled with: 10000·major + 100·minor + patch.
inline constexpr int kHeaderVersion =
    10000 * UNISONO_VERSION_MAJOR + 100 * UNISONO_VERSION_MINOR + UNISONO_VERSION_PATCH;

// Returns the version of the library that a program has loaded, in the same form.
UNISONO_API int library_version();

}  // namespace unisono
#endif
