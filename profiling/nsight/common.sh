# Sourced by ncu.sh and nsys.sh: folders, errors, and the program that they run.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$(dirname "$here")")
python=${PYTHON:-python3}
[ ! -d "$root/python/twell" ] || export PYTHONPATH=$root/python:$root${PYTHONPATH:+:$PYTHONPATH}

fail() { echo "${0##*/}: $*" >&2; exit 2; }
usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"; }
value() { [ $# -ge 2 ] || fail "$1 needs a value"; echo "$2"; }
# runs a command; with --dry-run prints it
run() { if [ -n "$dry" ]; then printf '%q ' "$@"; echo; else "$@"; fi; }
# the path of tool $1; $2 is a package with it
tool() {
  PATH=$PATH:/usr/local/cuda/bin command -v "$1" || { [ -n "$dry" ] && echo "$1"; } ||
    fail "no $1 in the path: it comes with the CUDA toolkit, or as $2"
}
