#!/usr/bin/env bash
# Checks that the tree is as its rules say. One line a check; exit 0 only when all are clean.
#
#   scripts/lint.sh          all checks
#   scripts/lint.sh --fix    first lets clang-format and ruff mend what they can
#   scripts/lint.sh --quick  without clang-tidy
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

FIX=0 TIDY=1
for argument in "$@"; do
  case $argument in
    --fix) FIX=1 ;;
    --quick) TIDY=0 ;;
    *) die "unknown argument '$argument'; see the top of scripts/lint.sh" 2 ;;
  esac
done

"$ROOT/scripts/setup.sh" --no-build
configure dev

# Tracked or new, not ignored, and still there.
files() {
  git ls-files -z --cached --others --exclude-standard -- "$@" | xargs -0 -r ls -d 2>/dev/null || true
}
mapfile -t ALL < <(files)
mapfile -t CPP < <(files '*.h' '*.cc' '*.cu' '*.cuh')
mapfile -t PY < <(files '*.py')
mapfile -t SHELL_FILES < <(files '*.sh' .ci/run)

FAILED=()
# check NAME COMMAND ...: its output only when it fails.
check() {
  local name=$1 output started=$SECONDS
  shift
  if output=$("$@" 2>&1); then
    say "ok      $name ($((SECONDS - started)) s)"
  else
    printf '%s\n' "$output"
    say "FAILED  $name"
    FAILED+=("$name")
  fi
}

formatted() {
  clang-format --dry-run -Werror "${CPP[@]}" 2>&1 | sed -n 's/:[0-9:]* error: .*/: not as clang-format has it/p' | uniq -c
  [ "${PIPESTATUS[0]}" = 0 ]
}
tidy() {
  build dev dmuon_proto && # generated headers
    python scripts/lint_tidy.py "$BUILD"
}
mypy_package() { (cd python_client && python -m mypy); }
# Their schemas and syntax; ctest runs the same with the daemon itself in place of /bin/true.
deploy_files() { python tests/deploy/deploy_test.py /bin/true SystemdUnit DaemonSet; }

if [ "$FIX" = 1 ]; then
  clang-format -i "${CPP[@]}"
  ruff check --quiet --fix "${PY[@]}" || true
fi

check "clang-format, ${#CPP[@]} files" formatted
[ "$TIDY" = 0 ] || check 'clang-tidy, files without gRPC' tidy
check "ruff, ${#PY[@]} files" ruff check --quiet "${PY[@]}"
check 'mypy, the package' mypy_package
check 'mypy, the tools' mypy --no-error-summary --scripts-are-modules scripts/lint_tree.py scripts/lint_tidy.py tests/layering/layering_test.py
check "shellcheck, ${#SHELL_FILES[@]} files" shellcheck -x "${SHELL_FILES[@]}"
check 'layering' python tests/layering/layering_test.py
check 'rules of the tree' python scripts/lint_tree.py "${ALL[@]}"
check 'the systemd unit and the manifest' deploy_files

if [ ${#FAILED[@]} -gt 0 ]; then
  say "${#FAILED[@]} failed: $(printf '%s; ' "${FAILED[@]}")"
  exit 1
fi
say 'clean'
