#!/bin/sh
# The C++ compiler, without debug information and without optimizing: so it takes a third of the
# time for the operators of DeepSpeed, which tests use with small tensors and nobody debugs here.
exec "$(dirname "$0")/launch_compiler.sh" c++ "$@" -g0 -O0
