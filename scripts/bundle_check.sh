#!/usr/bin/env bash
# Makes the bundle for a machine with a GPU (scripts/gpu_bundle.sh) and sees it work on a bare system: Debian 13 with Python and
# nothing else, without network, GPU or CUDA. That system lies outside the repository and is made when it is not there.
#
#   scripts/bundle_check.sh [--bundle FOLDER] [-k PATTERN]
#     --bundle FOLDER  this one, as it is (default: gpu-bundle, made anew)
#     -k PATTERN       only the tests whose name matches
#
# Needs root and the right to make namespaces and to mount in them. Exit 0: all passed; 1: a test failed; 77: not permitted here.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

BUNDLE='' TESTS=()
while [ $# -gt 0 ]; do
  case $1 in
    --bundle) BUNDLE=${2:?--bundle needs a folder} && shift ;;
    -k) TESTS+=(-k "${2:?-k needs a pattern}") && shift ;;
    -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0" && exit ;;
    *) die "unknown argument '$1'; see --help" 2 ;;
  esac
  shift
done

SUITE=trixie PACKAGES=python3 MIRROR=http://deb.debian.org/debian
BARE=$CACHE/bare-$SUITE-$(echo "$PACKAGES" | sha256sum | cut -c1-12)

# Everything that happens in it is gone when its first process ends: processes, mounts, what was written.
apart() { unshare --mount --pid --fork --kill-child --net --ipc --uts "$@"; }

permitted() {
  [ "$(id -u)" = 0 ] || { echo 'not root' && return 1; }
  apart sh -c 'mount -t tmpfs none /mnt && mount -t proc none /proc' 2>&1
}

make_bare_system() {
  [ ! -d "$BARE" ] || return 0
  command -v debootstrap >/dev/null || install_packages debootstrap
  local log=$BARE.log
  say "making a bare Debian ($SUITE) in $BARE"
  rm -rf "$BARE.part"
  debootstrap --variant=minbase --include="$PACKAGES" "$SUITE" "$BARE.part" "$MIRROR" >"$log" 2>&1 || {
    tail -20 "$log" >&2
    die "debootstrap failed; all it said is in $log"
  }
  rm -rf "$BARE.part"/var/cache/apt/archives/*.deb
  mv "$BARE.part" "$BARE"
}

why=$(permitted) || {
  say "skipped, not permitted here: $why"
  exit 77
}
mkdir -p "$CACHE"
exec 9>"$CACHE/bare.lock"
flock 9
make_bare_system 9>&-
exec 9>&-
if [ -z "$BUNDLE" ]; then
  "$ROOT/scripts/gpu_bundle.sh"
  BUNDLE=$ROOT/gpu-bundle
fi
[ -f "$BUNDLE/COMMIT" ] || die "no bundle in $BUNDLE"

say "$(basename "$BUNDLE") in a bare Debian ($SUITE), without network"
# Written to is memory alone; the bundle travels as it would: packed, and unpacked by the bare system's own tar. The first process
# is a shell that stays, so that somebody reaps what daemons leave.
# shellcheck disable=SC2016  # expanded there
tar -C "$BUNDLE" -c . | apart sh -euc '
  bare=$1 test=$2
  shift 2
  mount --make-rprivate /
  mount --bind "$bare" "$bare"
  mount -o remount,bind,ro "$bare"
  mount -t proc proc "$bare/proc"
  for folder in tmp run root dev/shm mnt; do mount -t tmpfs -o mode=1777 none "$bare/$folder"; done
  cp "$test" "$bare/root/"
  chroot "$bare" env -i PATH=/usr/bin:/bin:/usr/sbin:/sbin HOME=/root PYTHONDONTWRITEBYTECODE=1 sh -euc "
    mkdir /mnt/gpu-bundle
    tar -C /mnt/gpu-bundle -x
    exec python3 /root/bare_bundle_test.py /mnt/gpu-bundle \"\$@\" </dev/null" sh "$@" || exit
' sh "$BARE" "$ROOT/tests/scripts/bare_bundle_test.py" "${TESTS[@]}"
