#!/usr/bin/env bash
# Measures one thing and prints a table for people and, as its last line, one JSON object.
#
#   scripts/bench.sh NAME [arguments of the benchmark]
#
# Exit 2: no such NAME. Exit 4: its benchmark is not built yet.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

names() {
  cat <<'NAMES'
cuda_host what a step of 50 matrices costs the host when the device costs nothing, on the stand-ins for CUDA
latency   trigger to first work over a bare futex; gRPC calls and allocations of a steady step; overhead over the math
ns        Newton-Schulz against torch.optim.Muon's, times and errors
step      a whole optimizer step of GPT-2-small on 2 ranks against the in-process way
NAMES
}

NAME=${1:-}
shift || true
PRESET=dev
case $NAME in
  cuda_host)
    PRESET=cuda SOURCE=cuda_host.cc TARGETS=(cuda_host)
    RUN=(env "LD_LIBRARY_PATH=$ROOT/build/cuda/fakes" "$ROOT/build/cuda/bin/cuda_host")
    ;;
  latency) SOURCE=latency_bench.cc RUN=("$BUILD/bin/latency_bench") TARGETS=(latency_bench dmuond) ;;
  ns) SOURCE=ns.py RUN=(python tests/benchmark/ns.py) TARGETS=(dmuon_ns_bench) ;;
  step) SOURCE=step.py RUN=(python tests/benchmark/step.py) TARGETS=(dmuond dmuon_python dmuon_step_bench) ;;
  *)
    { [ -n "$NAME" ] && echo "no benchmark '$NAME'; there are:" || echo 'usage: scripts/bench.sh NAME, one of:'; } >&2
    names >&2
    exit 2
    ;;
esac
[ -f "tests/benchmark/$SOURCE" ] || die "$NAME: not built yet (tests/benchmark/$SOURCE is not there)" 4

{
  "$ROOT/scripts/setup.sh" --no-build
  configure "$PRESET"
  build "$PRESET" "${TARGETS[@]}"
} >&2
exec "${RUN[@]}" "$@"
