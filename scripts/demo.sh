#!/usr/bin/env bash
# The main job, whole: builds, starts a daemon, trains a small language model on real text with two ranks, once with
# Muon through the daemon and once with AdamW alone, and shows the loss, the placement and where the time went.
#
#   scripts/demo.sh [--steps N]
#
# Writes demo-out/loss.png. Ends with 0 when all of it ran and Muon's loss ends below AdamW's. A few minutes on 2 cores.
#
# Learning rates. Each side has the best of those that were tried at 250 steps (losses: docs/operations.md, "The demo"):
# AdamW alone 5e-4 1e-3 2e-3 3e-3 6e-3 1e-2, Muon 0.01 0.02.
MUON_LR=0.01
ADAMW_LR=1e-3
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

STEPS=250
while [ $# -gt 0 ]; do
  case $1 in
    --steps) [ $# -ge 2 ] || die "--steps needs a number" 2; STEPS=$2; shift 2 ;;
    -h | --help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) die "unknown argument '$1'; usage: scripts/demo.sh [--steps N]" 2 ;;
  esac
done
[[ $STEPS =~ ^[1-9][0-9]*$ ]] || die "--steps: expected a positive number, got '$STEPS'" 2

"$ROOT/scripts/setup.sh"

OUT=$ROOT/demo-out
WORK=$(mktemp -d)
mkdir -p "$OUT"
DAEMON=
TRAINER=
cleanup() {
  trap '' INT TERM
  [ -z "$TRAINER" ] || kill -TERM "$TRAINER" 2>/dev/null || true
  [ -z "$TRAINER" ] || wait "$TRAINER" 2>/dev/null || true
  [ -z "$DAEMON" ] || kill -TERM "$DAEMON" 2>/dev/null || true
  [ -z "$DAEMON" ] || wait "$DAEMON" 2>/dev/null || true
  rm -rf "$WORK"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

export DMUON_ENDPOINT=$WORK/run DMUON_JOB=demo OMP_NUM_THREADS=1

start_daemon() {
  mkfifo "$WORK/ready"
  dmuond --socket-dir "$DMUON_ENDPOINT" --ready-fd 3 3<>"$WORK/ready" 2>"$OUT/dmuond.log" &
  DAEMON=$!
  local word=
  read -r -t 20 word <>"$WORK/ready" || true
  [ "$word" = ready ] || { cat "$OUT/dmuond.log" >&2; die "the daemon did not start"; }
}

train() { # OPTIMIZER [arguments]
  local optimizer=$1
  shift
  # What --standalone means, but for the name "localhost", which a bare container may not know.
  python -m torch.distributed.run --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1 \
    --nproc-per-node 2 "$ROOT/python_client/examples/train_lm.py" \
    --optimizer "$optimizer" --steps "$STEPS" --results "$WORK/$optimizer.json" "$@" &
  TRAINER=$!
  local code=0
  wait "$TRAINER" || code=$?
  TRAINER=
  [ "$code" = 0 ] || die "training with $optimizer ended with $code; the daemon's log is $OUT/dmuond.log"
}

start_daemon
say "training with Muon through the daemon, lr $MUON_LR (AdamW for the rest: $ADAMW_LR)"
train muon --lr "$MUON_LR" --adamw-lr "$ADAMW_LR" --describe "$WORK/describe"
say "training with AdamW alone, lr $ADAMW_LR (tried: 5e-4 1e-3 2e-3 3e-3 6e-3 1e-2; Muon: 0.01 0.02)"
train adamw --adamw-lr "$ADAMW_LR"

printf '\nThe session, as dmuonctl shows it\n'
cat "$WORK/describe"
echo
status=0
python "$ROOT/scripts/demo_report.py" "$WORK/muon.json" "$WORK/adamw.json" "$OUT/loss.png" || status=$?
printf '\nplot: %s\n' "demo-out/loss.png"
exit $status
