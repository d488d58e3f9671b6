#!/usr/bin/env bash
# usage: run.sh COMMAND [ARGUMENT...]
# Runs a command in this folder with the bundled twell, for example: run.sh python3 -m pytest tests/gpu
# Needs Python @PYTHON@ with a CUDA build of torch, and no network.
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,4s/^# //p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
found=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ "$found" = "@PYTHON@" ] || { echo "run.sh: this bundle is for Python @PYTHON@, python3 is $found" >&2; exit 2; }

# The runtime library is compressed. It is unpacked once, into a folder that only this user can write.
cache=${TMPDIR:-/tmp}/twell-bundle-$(id -u)
mkdir -p -m 700 "$cache"
[ -O "$cache" ] || { echo "run.sh: $cache belongs to someone else" >&2; exit 2; }
runtime=$cache/@RUNTIME@
if [ ! -e "$runtime/libcute_dsl_runtime.so" ]; then
  part=$(mktemp -d "$cache/part.XXXXXX")
  python3 -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], "wb"))' \
    "$here/runtime/libcute_dsl_runtime.so.xz" "$part/libcute_dsl_runtime.so"
  mv -T "$part" "$runtime" 2>/dev/null || rm -rf "$part" # another run was first
fi

export PYTHONPATH=$here/site${PYTHONPATH:+:$PYTHONPATH}
export LD_LIBRARY_PATH=$runtime${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
cd "$here"
exec "$@"
