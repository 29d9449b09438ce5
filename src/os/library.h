// Functions of libraries that are loaded at run time.
#pragma once

#include <dlfcn.h>

namespace tensorferry::os {

// Finds a function in a library that dlopen() returned. Returns false if the library lacks it.
template <class Function>
bool find_function(void* library, const char* name, Function& function) noexcept {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace tensorferry::os
