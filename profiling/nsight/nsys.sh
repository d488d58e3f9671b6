#!/usr/bin/env bash
# usage: profiling/nsight/nsys.sh OP[,OP...] [OPTION...] [OPTION of profiling.bench...] [-- OPTION of nsys...]
#
# Records the timeline of operators on a named workload with Nsight Systems, warmed up: kernels, CUDA calls, and the
# a range for each variant. Prints the time of each kernel and of each range, on the GPU and on the host.
#
#   profiling/nsight/nsys.sh ffn --workload topic29 --strategy union
#   profiling/nsight/nsys.sh train --workload topic29 -m 8192 -o build/nsys/train
#
# OP is a bench or an operation of one: python -m profiling.bench --help. Ask for one workload and few strategies.
#
#   -o, --out PREFIX   PREFIX.nsys-rep, and a PREFIX_*.csv for each table (default: build/profiles/nsys-OP)
#   --dry-run          print the commands, run nothing
#
# PYTHON names the interpreter (default: python3).
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[ $# -gt 0 ] || { usage >&2; exit 2; }
op='' out='' dry='' target=() more=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit ;;
    -o | --out) out=$(value "$@"); shift ;;
    --dry-run) dry=yes ;;
    --) shift; more=("$@"); break ;;
    -*) target+=("$1") ;;
    *) if [ -z "$op" ]; then op=$1; else target+=("$1"); fi ;;
  esac
  shift
done
[ -n "$op" ] || fail "expected an operator, got none; --help lists them"
out=${out:-build/profiles/nsys-${op//,/-}}

nsys=$(tool nsys "Nsight Systems")
[ -n "$dry" ] || { mkdir -p "$(dirname "$out")"; rm -f "$out.nsys-rep"; }
run "$nsys" profile --trace=cuda,nvtx --sample=none --cpuctxsw=none --cuda-graph-trace=node \
  --capture-range=cudaProfilerApi --capture-range-end=stop --force-overwrite=true --output "$out" \
  ${more[@]+"${more[@]}"} "$python" -m profiling.bench "$op" --profile 3 ${target[@]+"${target[@]}"}
[ -n "$dry" ] || [ -s "$out.nsys-rep" ] || fail "nothing was recorded; nsys gave the reason above"
tables=cuda_gpu_kern_sum,nvtx_gpu_proj_sum,nvtx_sum
run "$nsys" stats --force-export=true --report "$tables" --format column "$out.nsys-rep"
run "$nsys" stats --quiet --report "$tables" --format csv --output "$out" "$out.nsys-rep"
