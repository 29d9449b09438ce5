#!/bin/sh
# The C++ compiler, without debug information: so it takes half the time for the operators of
# DeepSpeed, which tests use and nobody debugs here.
exec "$(dirname "$0")/launch_compiler.sh" c++ "$@" -g0
