// The version of these headers.
#pragma once

namespace unisono {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace unisono
