#!/usr/bin/env bash
# Checks and measures the CUDA backend on a machine with a GPU, from the bundle of scripts/gpu_bundle.sh. Each part has its own
# time limit, leaves what it has when that runs out, and takes no other with it. Needs CUDA's runtime and cuBLASLt 13 and Python 3;
# torch for the parts in Python; no network. `end_to_end` runs the suite of real daemons and C++ trainers on the GPU, two trainers
# on the one device among them, `trainer` a PyTorch trainer beside a daemon.
#
# usage: scripts/gpu_check.sh [--bundle FOLDER] [--out FOLDER] [--seconds N] [PART ...]
#   --bundle FOLDER  default: gpu-bundle, or the bundle that this script is in
#   --out FOLDER     where gpu_check.json and logs/ go (default: gpu-check)
#   --seconds N      for all parts together (default: 500)
#   PART             tests host kernels timing trainer end_to_end peer sanitizer accuracy
#                    (default: all, in this order)
#
# Exit code: 0 when everything ran and nothing was wrong; 1 when something was, or did not come to its end; 4 when nothing was wrong
# but not everything ran (no time, no compute-sanitizer, no C compiler for torch); 2 for a wrong command line; 3 when something is
# missing here without which nothing runs (it is named); 130 after Ctrl-C, with the results so far written.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

bundle=gpu-bundle out=gpu-check seconds=500
[[ -f COMMIT ]] && bundle=.
parts=()
every=(tests host kernels timing trainer end_to_end peer sanitizer accuracy)
wrong() { echo "error: $1; --help tells more" >&2; exit 2; }
missing() { echo "error: $1" >&2; exit 3; }
while (($#)); do
  case $1 in
    -h | --help) sed -n '2,18s/^# \{0,1\}//p' "$0"; exit 0 ;;
    --bundle | --out | --seconds) (($# > 1)) || wrong "$1 needs a value" ;;&
    --bundle) bundle=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --seconds) seconds=$2; shift 2 ;;
    -*) wrong "no option $1" ;;
    *) [[ " ${every[*]} " == *" $1 "* ]] || wrong "no part $1: expected one of ${every[*]}"; parts+=("$1"); shift ;;
  esac
done
[[ $seconds =~ ^[1-9][0-9]*$ ]] || wrong "--seconds: expected a whole number from 1, got '$seconds'"
((${#parts[@]})) || parts=("${every[@]}")
[[ -f $bundle/COMMIT ]] || missing "no bundle in $bundle: scripts/gpu_bundle.sh makes one"
command -v python3 > /dev/null || missing "no python3"
timeout 30 python3 - <<'PY' || exit 3
import ctypes
try:
    code = ctypes.CDLL("libcuda.so.1").cuInit(0)
except OSError as error:
    raise SystemExit(f"error: no NVIDIA driver: {error}")
if code != 0:
    raise SystemExit(f"error: the NVIDIA driver has no GPU to offer: cuInit answers {code}")
PY
cuda=$(python3 tests/cuda/gpu/libraries.py) || exit 3
cuda+=${LD_LIBRARY_PATH:+${cuda:+:}$LD_LIBRARY_PATH}
mkdir -p "$out" || exit 3
bundle=$(realpath "$bundle") out=$(realpath "$out")
logs=$out/logs work=$(mktemp -d)
[[ -e $out/gpu_check.json || -e $out/steps.tsv || -z $(ls -A "$out") ]] ||
  wrong "--out: expected an empty folder or that of an earlier check, got '$out'"
rm -rf "$logs" "$out"/*.json "$out/steps.tsv"
mkdir -p "$logs"
trap 'rm -rf "$work"' EXIT
echo "bundle $(cat "$bundle/COMMIT"), CUDA libraries in ${cuda:-/etc/ld.so.cache}"
command -v nvidia-smi > /dev/null &&
  timeout 30 nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.max.sm,power.draw,temperature.gpu --format=csv,noheader

# Ctrl-C ends the part that runs; timeout's own process group does not hear it.
interrupted=0 running=
interrupt() {
  interrupted=1
  local job
  for job in $(jobs -p); do kill "$job" 2> /dev/null; done
}
trap interrupt INT
limited() {  # seconds, command ...: its exit code
  LD_LIBRARY_PATH=${libraries-$cuda} timeout -k 5 "$@" &
  running=$!
  wait "$running" && return
  local code=$?
  ((interrupted)) && wait "$running"
  return "$code"
}

smaller() { echo $(($1 < $2 ? $1 : $2)); }
record() { printf '%s\t%s\t%s\t%s\n' "$@" >> "$out/steps.tsv"; echo "$1: $2${4:+, $4} ($3 s)"; }

# step NAME SECONDS COMMAND ...: within its limit and what is left. What it says goes to logs/NAME.log, how it ended to the report.
step() {
  local name=$1 limit begin=$SECONDS code state=failed what=
  limit=$(smaller "$2" $((seconds - SECONDS - 8)))  # 5 until timeout's KILL, and the report
  shift 2
  ((interrupted)) && return
  ((limit >= 5)) || { record "$name" "not run" 0 "no time left"; return; }
  DEADLINE=$(($(date +%s) + limit - 3)) limited "$limit" "$@" > "$logs/$name.log" 2>&1
  code=$?
  case $code in
    0) state=ok ;;
    4) state=incomplete what="see its entries" ;;
    124 | 137) state=stopped what="its time ran out" ;;
    *) what="exit code $code" && ((code > 128)) && what="signal $(kill -l $((code - 128)))" ;;
  esac
  ((interrupted)) && state=interrupted what=
  record "$name" "$state" $((SECONDS - begin)) "$what"
  [[ $state == failed || $state == stopped ]] && { grep -aE "FAILED|Failure" "$logs/$name.log" | head -20; tail -n 8 "$logs/$name.log"; }
}

# The e2e suite copies programs away from the bundle's libraries.
native() { libraries=$bundle/lib${cuda:+:$cuda} step "$@"; }
of_python() { step "$1" "$2" python3 -u "tests/cuda/gpu/$1.py" "$bundle/lib" "$out/$1.json"; }

run_tests() {
  local test
  for test in cuda_step_kernels_test cuda_newton_schulz_test; do
    native "$test" 45 "$bundle/bin/$test" --gtest_output=json:"$out/$test.json"
  done
}

# A step's host time, and how long a record takes to the first kernel.
run_host() {
  native host 30 "$bundle/bin/cuda_host"
  grep -a '^{' "$logs/host.log" > "$out/host.json"
}

# Most of a test is the start of its daemon, so some run side by side.
run_end_to_end() {
  # shellcheck disable=SC2016  # expanded there
  native end_to_end 90 env DMUON_TEST_BACKEND=cuda GTEST_TOTAL_SHARDS="$(smaller 4 $((($(nproc) + 3) / 4)))" bash -c '
    for ((i = 0; i < GTEST_TOTAL_SHARDS; ++i)); do
      GTEST_SHARD_INDEX=$i "$1/bin/e2e_test" --gtest_output=json:"$2/e2e_test.$i.json" > "$2/logs/e2e_test.$i.log" 2>&1 &
      shards[i]=$!
    done
    code=0
    for shard in "${shards[@]}"; do wait "$shard" || code=$?; done
    grep -ahE "^\[  FAILED  \]" "$2"/logs/e2e_test.*.log
    exit "$code"' bash "$bundle" "$out"
}

run_trainer() {
  step wheel 20 env TO="$work/python" python3 - "$bundle"/wheels/*.whl <<'PY'
import os, sys, zipfile
for wheel in sys.argv[1:]:  # pip may not be there
    zipfile.ZipFile(wheel).extractall(os.environ["TO"])
PY
  PYTHONPATH=$work/python:tests/python${PYTHONPATH:+:$PYTHONPATH} PATH=$bundle/bin:$PATH of_python trainer 60
}

run_sanitizer() {
  local sanitizer tool test
  sanitizer=$(PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin:/usr/local/cuda/bin command -v compute-sanitizer) ||
    { record sanitizer "not run" 0 "no compute-sanitizer here"; return; }
  trap interrupt TERM
  for tool in memcheck racecheck; do
    for test in "cuda_step_kernels_test --gtest_filter=-*AgreesWithFloat64AndIts*" \
                "cuda_newton_schulz_test --gtest_filter=*Zeros*:*NotAligned*"; do
      # shellcheck disable=SC2086
      native "$tool.${test%% *}" 60 "$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit 5 "$bundle"/bin/$test
    done
  done
}

for part in "${parts[@]}"; do
  ((interrupted)) && break
  echo "--- $part ($((seconds - SECONDS)) s left)"
  case $part in
    tests) run_tests ;;
    host) run_host ;;
    end_to_end) run_end_to_end ;;
    trainer) run_trainer ;;
    kernels) of_python kernels 40 ;;
    timing) of_python timing 110 ;;
    peer) of_python peer 60 ;;
    sanitizer) run_sanitizer & ;;  # nothing is timed beside it
    accuracy) of_python accuracy 60 ;;
  esac
done
wait

timeout 60 python3 tests/cuda/gpu/report.py "$out"
code=$?
echo "$SECONDS s; results in $out/gpu_check.json, what the parts said in $logs"
((interrupted)) && { echo "interrupted; the results are those of the parts before" >&2; exit 130; }
exit "$code"
