#!/bin/sh
# Runs a compiler under ccache, if that is installed: what was compiled once, in any checkout, is
# not compiled again. It looks for ccache now, because setup.sh may install it after make started.
command -v ccache >/dev/null 2>&1 && exec ccache "$@"
exec "$@"
