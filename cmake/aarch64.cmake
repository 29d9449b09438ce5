# Debian's cross compiler, with the libraries that `scripts/setup.sh sysroot` has unpacked. Programs
# run under qemu, which finds the C library where the compiler has it.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)

set(sysroot ${CMAKE_CURRENT_LIST_DIR}/../build/aarch64/sysroot)
# g++ 12 sees overlapping copies in additions of strings that are none.
set(CMAKE_CXX_FLAGS_INIT "-isystem ${sysroot}/usr/include -Wno-restrict")
foreach(kind EXE SHARED)
  set(CMAKE_${kind}_LINKER_FLAGS_INIT "-L${sysroot}/usr/lib/aarch64-linux-gnu")
endforeach()
set(CMAKE_FIND_ROOT_PATH ${sysroot})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
