#!/bin/sh
# Runs a compiler under ccache, if that is installed: what was compiled once, in any checkout, is not
# compiled again. `make` looks for ccache here, and not when it starts: setup.sh may install it later.
command -v ccache >/dev/null 2>&1 && exec ccache "$@"
exec "$@"
