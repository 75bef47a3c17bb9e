// Pieces of the texts of errors.
#pragma once

#include <cstddef>
#include <cstdio>
#include <string>
#include <string_view>

namespace unisono {

// Returns as much of a UTF-8 text as fits into `bytes` bytes, in whole letters.
inline std::string_view fitting(std::string_view text, std::size_t bytes) {
  if (text.size() <= bytes) return text;
  while (bytes > 0 && (text[bytes] & 0xC0) == 0x80) --bytes;
  return text.substr(0, bytes);
}

// Returns a number as printf's %g writes it.
inline std::string brief(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", number);
  return text;
}

// Returns a version as text: 10203 is "1.2.3".
inline std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace unisono
