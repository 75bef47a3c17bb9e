#include "unisono/error.hpp"

#include <cerrno>
#include <system_error>

namespace unisono {

long check(long result, std::string_view what, std::source_location where) {
  if (result >= 0) return result;
  const int code = errno;
  throw ResourceError(std::string(what) + " failed: " + std::generic_category().message(code) + " (" +
                      where.function_name() + ").");
}

}  // namespace unisono
