// The one place where the version is written. CMake, pkg-config and every package read it here.
#pragma once

#define TENSORFERRY_VERSION "0.1.0"
