// Between XLA's typed FFI and the core's plain descriptions.
#pragma once

#include <xla/ffi/api/ffi.h>

#include <string>
#include <string_view>
#include <vector>

#include "../core/engine.h"

namespace cudnn_grouped::bindings {

namespace ffi = ::xla::ffi;

// A failed check, or a call that does not fit its description, on its way to the handler.
struct CallFailure {
  Error error;
};
[[noreturn]] void misfit(std::string const& argument, std::string const& text);

// One buffer of a call as the Python side describes it: "name", "name[1,2,0]" where the operator's dimension i is the
// buffer's dimension axes[i], or "name:int64" where the bytes of the buffer are numbers of that dtype.
struct Entry {
  std::string name;
  std::vector<int> axes;
  DType bytes_of = DType::none;
};
// Entries parted by spaces.
std::vector<Entry> entries(std::string_view text);

Tensor describe(Entry const& entry, ffi::AnyBuffer const& buffer, Device device);

std::string_view attribute(ffi::Dictionary const& attributes, std::string_view name);
// Reads an option where it is given. Attributes that are no option's are the caller's to find.
void read_option(ffi::Dictionary const& attributes, char const* name, bool& into);
void read_option(ffi::Dictionary const& attributes, char const* name, int64_t& into);
void read_option(ffi::Dictionary const& attributes, char const* name, double& into);
void read_option(ffi::Dictionary const& attributes, char const* name, std::string& into);
void read_option(ffi::Dictionary const& attributes, char const* name, DType& into);
void read_option(ffi::Dictionary const& attributes, char const* name, std::vector<int64_t>& into);
template <class T>
void read_option(ffi::Dictionary const& attributes, char const* name, std::optional<T>& into) {
  if (attributes.contains(name)) read_option(attributes, name, into.emplace());
}

}  // namespace cudnn_grouped::bindings
