#!/usr/bin/env bash
# Checks and measures the CUDA backend on a machine with a GPU, from the bundle of scripts/gpu_bundle.sh. Each part has its own
# time limit and leaves what it has when that runs out. Needs CUDA's runtime and cuBLASLt 13, Python 3 with torch; no network.
# `end_to_end` runs the suite of real daemons and C++ trainers on the GPU, `trainer` a PyTorch trainer beside a daemon.
#
# usage: scripts/gpu_check.sh [--bundle FOLDER] [--out FOLDER] [--seconds N] [PART ...]
#   --bundle FOLDER  default: gpu-bundle, or the bundle that this script is in
#   --out FOLDER     where the JSON files go (default: gpu-check)
#   --seconds N      for all parts together (default: 480)
#   PART             tests end_to_end trainer timing kernels sanitizer accuracy (default: all, in this order)
#
# Exit code: 0 when the tests and the sanitizer found nothing; 1 when they did; 2 for a wrong command line; 3 when something is
# missing here (it is named); 130 after Ctrl-C, with the results so far written.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

bundle=gpu-bundle out=gpu-check seconds=480
[[ -f COMMIT ]] && bundle=.
parts=()
every=(tests end_to_end trainer timing kernels sanitizer accuracy)
wrong() { echo "error: $1; --help tells more" >&2; exit 2; }
missing() { echo "error: $1" >&2; exit 3; }
while (($#)); do
  case $1 in
    -h | --help) sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 0 ;;
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
python3 - <<'PY' || exit 3
import ctypes
try:
    code = ctypes.CDLL("libcuda.so.1").cuInit(0)
except OSError as error:
    raise SystemExit(f"error: no NVIDIA driver: {error}")
if code != 0:
    raise SystemExit(f"error: the NVIDIA driver has no GPU to offer: cuInit answers {code}")
PY
mkdir -p "$out" || exit 3
bundle=$(realpath "$bundle") out=$(realpath "$out")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
started=$(date +%s)
failed=0

remaining() { echo $((started + seconds - $(date +%s))); }
smaller() { echo $(($1 < $2 ? $1 : $2)); }

cuda=$(python3 tests/cuda/gpu/libraries.py) || exit 3
cuda+=${LD_LIBRARY_PATH:+${cuda:+:}$LD_LIBRARY_PATH}
echo "bundle $(cat "$bundle/COMMIT"), CUDA libraries in $cuda"
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.max.sm,power.draw,temperature.gpu --format=csv,noheader

# Ctrl-C ends the part that runs; timeout's own process group does not hear it.
interrupted=0 running=
trap 'interrupted=1; [[ -z $running ]] || kill "$running" 2> /dev/null' INT
limited() {  # folder of libraries, seconds, command ...: its exit code
  LD_LIBRARY_PATH=$1${1:+${cuda:+:}}$cuda timeout -k 5 "${@:2}" &
  running=$!
  wait "$running" && return
  local code=$?
  ((interrupted)) && wait "$running"
  return "$code"
}
# The e2e suite copies programs away from the bundle's libraries.
native() { limited "$bundle/lib" "$@"; }

run_test() {  # name, seconds, arguments
  local name=$1 limit
  limit=$(smaller "$2" "$(remaining)")
  shift 2
  native "$limit" "$bundle/bin/$name" "$@" --gtest_output=json:"$out/$name.json" > "$work/$name.log" 2>&1
  local code=$?
  grep -E "FAILED|PASSED|Failure|actual" "$work/$name.log" | head -40
  ((code == 0)) || { failed=1; echo "$name: exit code $code"; tail -5 "$work/$name.log"; }
}

run_tests() {
  run_test cuda_step_kernels_test 60
  run_test cuda_newton_schulz_test 60
}

# Two trainers on the one device, and everything else that the suite has.
run_end_to_end() { DMUON_TEST_BACKEND=cuda run_test e2e_test 120; }

run_trainer() {
  local wheel
  for wheel in "$bundle"/wheels/*.whl; do  # pip may not be there
    python3 -m zipfile -e "$wheel" "$work/python" || { failed=1; return; }
  done
  PYTHONPATH=$work/python:tests/python PATH=$bundle/bin:$PATH run_python trainer 75
}

run_python() {  # part, seconds
  local limit
  limit=$(smaller "$2" "$(remaining)")
  DEADLINE=$(($(date +%s) + limit - 3)) PYTHONUNBUFFERED=1 \
    limited "" "$limit" python3 "tests/cuda/gpu/$1.py" "$bundle/lib" "$out/$1.json" > "$work/$1.log" 2>&1
  local code=$?
  ((code == 0)) || { failed=1; echo "$1: exit code $code"; tail -8 "$work/$1.log"; }
}

run_sanitizer() {
  local tool limit log
  command -v compute-sanitizer > /dev/null || { echo "no compute-sanitizer here"; return; }
  for tool in memcheck racecheck; do
    log="$work/sanitizer.log"
    limit=$(smaller 60 "$(remaining)")
    ((limit > 5)) || { echo "$tool: no time left"; continue; }
    for test in "cuda_step_kernels_test --gtest_filter=-*AgreesWithFloat64AndIts*" \
                "cuda_newton_schulz_test --gtest_filter=*Zeros*:*NotAligned*"; do
      # shellcheck disable=SC2086
      native "$limit" compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 5 "$bundle"/bin/$test \
        > "$log.one" 2>&1
      local code=$?
      echo "$tool ${test%% *}: exit code $code; $(grep -E 'SUMMARY' "$log.one" | tail -1)"
      cat "$log.one" >> "$log"
      ((code == 9)) && grep -vE "^\[|^Note" "$log.one" | head -20
      limit=$(smaller 60 "$(remaining)")
    done
    rm -f "$log.one"
  done
}

for part in "${parts[@]}"; do
  ((interrupted)) && break
  (($(remaining) > 8)) || { echo "$part: no time left"; continue; }
  echo "--- $part ($(remaining) s left)"
  case $part in
    tests) run_tests ;;
    end_to_end) run_end_to_end ;;
    trainer) run_trainer ;;
    timing) run_python timing 130 ;;
    accuracy) run_python accuracy 75 ;;
    kernels) run_python kernels 40 ;;
    sanitizer) run_sanitizer > "$out/sanitizer.txt" & ;;  # nothing is timed beside it
  esac
done
wait
cat "$out/sanitizer.txt" 2> /dev/null
grep -q "exit code 9" "$out/sanitizer.txt" 2> /dev/null && failed=1

# One file of results and one of logs.
python3 tests/cuda/gpu/report.py "$out"
(cd "$work" && tail -n +1 ./*.log > "$out/logs.txt" 2> /dev/null)
echo "$(($(date +%s) - started)) s; results in $out/gpu_check.json"
((interrupted)) && { echo "interrupted; the results are those of the parts before" >&2; exit 130; }
exit "$failed"
