#!/usr/bin/env bash
# Builds what has changed and runs the tests: ctest, then pytest. The last lines are the counts.
#
#   scripts/test.sh [--cxx | --python] [-k PATTERN]   all tests, or one language, or those whose name matches; where
#                                                     nvcc is, also those of the CUDA backend on stand-ins for a GPU
#   scripts/test.sh --asan | --tsan [-k PATTERN]      unit tests under AddressSanitizer and UBSan; those without gRPC
#                                                     under ThreadSanitizer
#   scripts/test.sh --bundle [-k PATTERN]             the bundle for a machine with a GPU, made and run on a bare system:
#                                                     scripts/bundle_check.sh
#
# Exit 0: all passed, and some ran. Exit 1: a test failed, or none ran.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

CXX=1 PYTHON=1 SANITIZER='' PATTERN=''
while [ $# -gt 0 ]; do
  case $1 in
    --cxx) PYTHON=0 ;;
    --python) CXX=0 ;;
    --bundle) shift && exec "$ROOT/scripts/bundle_check.sh" "$@" ;;
    --asan | --tsan) SANITIZER=${1#--} PYTHON=0 ;;
    -k) PATTERN=${2:?-k needs a pattern} && shift ;;
    *) die "unknown argument '$1'; see the top of scripts/test.sh" 2 ;;
  esac
  shift
done

REPORTS=$(mktemp -d)
trap 'rm -rf "$REPORTS"' EXIT
SUMMARY=() FAILED=0 RAN=0
EXCLUDED='^slow$' # labels

# count NAME REPORT STATUS: adds "NAME: n passed, m failed" to the summary, from a JUnit report.
count() {
  local passed=0 failed=0 skipped=0
  if [ -s "$2" ]; then
    read -r passed failed skipped < <(python3 - "$2" <<'PYTHON'
import sys
import xml.etree.ElementTree as ET
suites = list(ET.parse(sys.argv[1]).getroot().iter("testsuite"))
total, failed, skipped = (
    sum(int(s.get(k) or 0) for s in suites for k in keys)
    for keys in (["tests"], ["failures", "errors"], ["skipped", "disabled"]))
print(total - failed - skipped, failed, skipped)
PYTHON
    )
  fi
  local line="$1: $passed passed, $failed failed"
  [ "$skipped" = 0 ] || line+=", $skipped skipped"
  SUMMARY+=("$line")
  RAN=$((RAN + passed + failed))
  [ "$3" = 0 ] && [ "$failed" = 0 ] || FAILED=1
  # With a pattern, one of the runners may have nothing to do.
  [ -n "$PATTERN" ] || [ $((passed + failed)) -gt 0 ] || FAILED=1
}

# run_ctest NAME FOLDER [ctest arguments]
run_ctest() {
  local name=$1 folder=$2 status=0
  shift 2
  say "ctest in ${folder#"$ROOT/"}"
  ctest --test-dir "$folder" -j"$(nproc)" --output-on-failure --no-tests=ignore --label-exclude "$EXCLUDED" \
    --output-junit "$REPORTS/$name.xml" ${PATTERN:+-R "$PATTERN"} "$@" || status=$?
  count "$name" "$REPORTS/$name.xml" "$status"
}

# No GPU is needed, only the compiler.
run_cuda() {
  if ! command -v nvcc >/dev/null && [ ! -x /usr/local/cuda/bin/nvcc ]; then
    SUMMARY+=('cuda: not built and not tested, there is no nvcc here')
    return
  fi
  configure cuda
  build cuda cuda_fake_tests
  run_ctest cuda "$ROOT/build/cuda" -L '^cuda_fake$'
}

run_pytest() {
  local status=0
  say "pytest in tests/python"
  python -m pytest tests/python --junitxml="$REPORTS/pytest.xml" -q ${PATTERN:+-k "$PATTERN"} || status=$?
  [ "$status" = 5 ] && [ -n "$PATTERN" ] && status=0 # 5: none was selected
  count pytest "$REPORTS/pytest.xml" "$status"
}

case $SANITIZER in
  '')
    "$ROOT/scripts/setup.sh"
    [ "$CXX" = 0 ] || run_ctest ctest "$BUILD"
    [ "$CXX" = 0 ] || run_cuda
    [ "$PYTHON" = 0 ] || run_pytest
    ;;
  *)
    "$ROOT/scripts/setup.sh" --no-build
    configure "$SANITIZER"
    case $SANITIZER in
      asan) build asan unit_tests ;;
      tsan) build tsan tests_without_grpc ;;
    esac
    export ASAN_OPTIONS=detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1
    export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
    # What was not built for the sanitizer is listed by ctest as NAME_NOT_BUILT.
    EXCLUDED='^(slow|uninstrumented)$'
    # Minutes each when instrumented; the tables of errors say nothing about threads.
    SLOW='LargeShapes'
    [ "$SANITIZER" = asan ] || SLOW+='|EachKernel\.'
    run_ctest ctest "$ROOT/build/$SANITIZER" --exclude-regex "_NOT_BUILT$|$SLOW"
    ;;
esac

echo
printf '%s\n' "${SUMMARY[@]}"
[ "$RAN" -gt 0 ] || die "no test ran"
exit "$FAILED"
