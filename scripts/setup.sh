#!/usr/bin/env bash
# Makes everything that the other scripts need: Debian packages, a Python environment, build/dev. Does only what is
# missing; a second run says nothing and takes a second.
#
#   scripts/setup.sh [--no-build]
#
# Needs Debian 12 (or an Ubuntu with the same packages), root or sudo; downloads from apt and PyPI only.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

BUILD_WANTED=1
for argument in "$@"; do
  case $argument in
    --no-build) BUILD_WANTED=0 ;;
    *) die "unknown argument '$argument'; usage: scripts/setup.sh [--no-build]" 2 ;;
  esac
done

PACKAGES=(
  g++ cmake ninja-build ccache pkg-config git ca-certificates
  libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc libabsl-dev
  libyaml-cpp-dev libcli11-dev nlohmann-json3-dev
  libgtest-dev libgmock-dev
  python3 python3-dev python3-venv
  clang-format clang-tidy shellcheck systemd
)

# Packages and environment are shared by all checkouts: one at a time. What they start does not inherit the lock, and the
# build of this checkout is nobody else's business.
mkdir -p "$CACHE"
exec 9>"$CACHE/setup.lock"
flock -n 9 || {
  say "waiting for another setup, which holds $CACHE/setup.lock"
  flock 9
}
install_packages "${PACKAGES[@]}" 9>&-
if [ ! -f "$VENV/.ready" ]; then
  say "making the Python environment $VENV (PyTorch is several GB: a few minutes)"
  make_venv "$VENV" "$REQUIREMENTS" 9>&-
fi
exec 9>&-

if [ "$BUILD_WANTED" = 1 ]; then
  configure dev
  build dev
fi
