#!/bin/sh
# usage: python3 [ARGUMENT...]
# Python for ARM, emulated: of the Debian beside this file, with the files of this machine. Its own children, too, since it
# takes this file for its executable.
here=$(cd "$(dirname "$0")" && pwd)
exec qemu-aarch64-static -0 "$here/python3" -L "$here/root" "$here/root/usr/bin/python3" "$@"
