#!/usr/bin/env bash
# Measures one thing and prints a table for people and, as its last line, one JSON object.
#
#   scripts/bench.sh NAME [arguments of the benchmark]
#
# Exit 2: no such NAME. Exit 4: its benchmark is not built yet.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

names() {
  cat <<'NAMES'
latency   trigger to first work over a bare futex; gRPC calls and allocations of a steady step; overhead over the math
ns        Newton-Schulz against torch.optim.Muon's, times and errors
step      a whole optimizer step of GPT-2-small on 2 ranks against the in-process way
NAMES
}

NAME=${1:-}
shift || true
case $NAME in
  latency) TARGET=latency_bench RUN=("$BUILD/bin/latency_bench") SOURCE=tests/benchmark/latency_bench.cc ;;
  ns | step) TARGET='' RUN=(python "tests/benchmark/$NAME.py") SOURCE=tests/benchmark/$NAME.py ;;
  *)
    { [ -n "$NAME" ] && echo "no benchmark '$NAME'; there are:" || echo 'usage: scripts/bench.sh NAME, one of:'; } >&2
    names >&2
    exit 2
    ;;
esac
[ -f "$SOURCE" ] || die "$NAME: not built yet ($SOURCE is not there)" 4

"$ROOT/scripts/setup.sh" >&2
[ -z "$TARGET" ] || [ -x "${RUN[0]}" ] || build dev "$TARGET" >&2
exec "${RUN[@]}" "$@"
