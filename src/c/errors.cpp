// The errors of the C interface: a status, and a text for each thread.
#include <cstdint>
#include <cstdio>
#include <exception>
#include <new>
#include <string>

#include "c/arguments.hpp"

namespace unisono::c {
namespace {

thread_local char last_error[2048] = "";

int failed(int status, const char* text) noexcept {
  std::snprintf(last_error, sizeof last_error, "%s", text);
  return status;
}

}  // namespace

int failed() noexcept {
  try {
    throw;
  } catch (const UsageError& error) {
    return failed(UNISONO_ERROR_USAGE, error.what());
  } catch (const MismatchError& error) {
    return failed(UNISONO_ERROR_MISMATCH, error.what());
  } catch (const TimeoutError& error) {
    return failed(UNISONO_ERROR_TIMEOUT, error.what());
  } catch (const PeerLostError& error) {
    return failed(UNISONO_ERROR_PEER_LOST, error.what());
  } catch (const ResourceError& error) {
    return failed(UNISONO_ERROR_RESOURCE, error.what());
  } catch (const std::bad_alloc&) {
    return failed(UNISONO_ERROR_RESOURCE, "there is no memory left: free some, or use smaller buffers.");
  } catch (const std::exception& error) { return failed(UNISONO_ERROR_OTHER, error.what()); } catch (...) {
    return failed(UNISONO_ERROR_OTHER, "a callback has thrown an exception: let it return a number.");
  }
}

void refuse_null(const char* name) { throw UsageError(std::string(name) + " is null: give its address."); }

void refuse_number(std::int32_t value, int values, const char* name, const char* type) {
  throw UsageError(std::string(name) + "=" + std::to_string(value) + " is no " + type +
                   ": give one from 0 to " + std::to_string(values - 1) + ".");
}

}  // namespace unisono::c

const char* unisono_error_text() { return unisono::c::last_error; }
