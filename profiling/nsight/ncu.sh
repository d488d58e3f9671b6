#!/usr/bin/env bash
# usage: profiling/nsight/ncu.sh OP[,OP...] [OPTION...] [OPTION of profiling.bench...] [-- OPTION of ncu...]
#
# Measures the kernels of operators on a named workload with Nsight Compute (speed of light, memory, scheduler, warp
# states, launch, occupancy) and prints the mean of each figure by kernel.
#
#   profiling/nsight/ncu.sh ffn --workload topic29 --strategy row
#   profiling/nsight/ncu.sh train --workload topic29 --strategy union --kernel weight_grad -o build/ncu/weight_grad
#   profiling/nsight/ncu.sh moe --sequences 8 --launch-skip 1 --launch-count 1
#
# OP is a bench or an operation of one: python -m profiling.bench --help. Ask for one workload and few strategies.
#
#   --kernel NAME      only kernels of this operator, or names that match regex:EXPRESSION (default: all of twell's)
#   --launch-skip N    leave out the first N matching launches (default: 0)
#   --launch-count N   measure at most N launches (default: all)
#   --cache-control C  all: empty the caches before each measurement; none: leave them (default: all)
#   -o, --out PREFIX   PREFIX.ncu-rep (default: build/profiles/ncu-OP)
#   --dry-run          print the commands, run nothing
#
# Clocks stay as they are (--clock-control none). Kernels compiled with CUTE_DSL_LINEINFO=1 in the environment show
# lines of source. PYTHON names the interpreter (default: python3).
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# regular expression for the kernels of operator $1, by the compiler's names and by the names of this repository
pattern() {
  case $1 in
    regex:*) echo "$1" ;;
    '') echo 'regex:cute_kernels|^twell_' ;;
    *[!a-z_]*) fail "--kernel takes the name of a kernel or regex:EXPRESSION, got $1" ;;
    *) echo "regex:cute_kernels$1[A-Z]|^twell_$1_(bf16|fp16|[0-9]|forward|input|weight)" ;;
  esac
}

[ $# -gt 0 ] || { usage >&2; exit 2; }
op='' kernel='' skip='' count='' cache=all out='' dry='' target=() more=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit ;;
    --kernel) kernel=$(value "$@"); shift ;;
    --launch-skip) skip=$(value "$@"); shift ;;
    --launch-count) count=$(value "$@"); shift ;;
    --cache-control) cache=$(value "$@"); shift ;;
    -o | --out) out=$(value "$@"); shift ;;
    --dry-run) dry=yes ;;
    --) shift; more=("$@"); break ;;
    -*) target+=("$1") ;;
    *) if [ -z "$op" ]; then op=$1; else target+=("$1"); fi ;;
  esac
  shift
done
[ -n "$op" ] || fail "expected an operator, got none; --help lists them"
for number in "$skip" "$count"; do
  case $number in *[!0-9]*) fail "--launch-skip and --launch-count take numbers, got $number" ;; esac
done
name=$(pattern "$kernel")
out=${out:-build/profiles/ncu-${op//,/-}}

ncu=$(tool ncu "Nsight Compute")
program=("$python" -m profiling.bench "$op" --profile 3 ${target[@]+"${target[@]}"})
sections=()
for section in SpeedOfLight ComputeWorkloadAnalysis MemoryWorkloadAnalysis SchedulerStats WarpStateStats LaunchStats \
  Occupancy SourceCounters; do
  sections+=(--section "$section")
done

[ -n "$dry" ] || mkdir -p "$(dirname "$out")"
[ -n "$dry" ] || rm -f "$out.ncu-rep"
run "$ncu" --profile-from-start off --clock-control none --cache-control "$cache" --nvtx --import-source yes \
  "${sections[@]}" --metrics sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active \
  --kernel-name "$name" ${skip:+--launch-skip "$skip"} ${count:+--launch-count "$count"} \
  --force-overwrite --export "$out" ${more[@]+"${more[@]}"} "${program[@]}"
[ -n "$dry" ] || [ -s "$out.ncu-rep" ] || fail "nothing was measured: no kernel matched $name, or ncu gave the reason above"
run "$ncu" --import "$out.ncu-rep" --page details --print-summary per-kernel
