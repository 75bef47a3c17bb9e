#pragma once

#include <cstddef>
#include <string_view>

namespace unisono {

// As much of a text in UTF-8 as `bytes` hold, in whole letters.
inline std::string_view fitting(std::string_view text, std::size_t bytes) {
  if (text.size() <= bytes) return text;
  while (bytes > 0 && (text[bytes] & 0xC0) == 0x80) --bytes;
  return text.substr(0, bytes);
}

}  // namespace unisono
