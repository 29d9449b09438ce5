// Functions of libraries that are found at run time.
#pragma once

#include <dlfcn.h>

namespace tensorferry::os {

// Takes a function out of a library that dlopen() has given; false if it has none of that name.
template <class Function>
bool find_function(void* library, const char* name, Function& function) noexcept {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace tensorferry::os
